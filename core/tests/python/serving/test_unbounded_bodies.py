"""Bodies whose parts are many or long are refused without work that grows with them on the server's loop."""

from __future__ import annotations

import difflib
from typing import Any

import pytest

from tokenspeed.errors import RequestError
from tokenspeed.serving.protocol import completions
from tokenspeed.serving.protocol.chat import parse_chat
from tokenspeed.serving.protocol.completions import parse_completion


def test_no_nearest_name_is_looked_for_where_a_field_name_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    nearest = difflib.get_close_matches

    def recorded(word: str, *rest: Any) -> list[str]:
        lengths.append(len(word))
        return nearest(word, *rest)

    monkeypatch.setattr(difflib, "get_close_matches", recorded)
    with pytest.raises(RequestError, match="unknown field xxx") as error:
        parse_completion({"prompt": "hi", "x" * 100_000: 1})
    assert len(error.value.message) < 200
    with pytest.raises(RequestError, match="did you mean max_tokens"):
        parse_completion({"prompt": "hi", "max_token": 1})
    assert lengths == [9]


@pytest.mark.parametrize("prompt", [[[]] * 3000, ["x"] * 3000, [1, *([[]] * 3000)]], ids=["rows", "texts", "mixed"])
def test_prompts_are_counted_before_they_are_converted(prompt: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def converted(*_: Any) -> None:
        pytest.fail("the rows were converted first")

    monkeypatch.setattr(completions, "parse_object", converted)
    with pytest.raises(RequestError, match="prompt: at most 2048 prompts") as error:
        parse_completion({"prompt": prompt})
    assert error.value.param == "prompt"


def test_many_ids_are_one_prompt() -> None:
    assert len(parse_completion({"prompt": [1] * 3000}).prompt) == 3000


def test_entries_of_chat_template_kwargs_are_bounded() -> None:
    def body(entries: int) -> dict[str, Any]:
        kwargs = {f"k{at}": 1 for at in range(entries)}
        return {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": kwargs}

    parse_chat(body(1000))
    with pytest.raises(RequestError, match="at most 1000 entries, got 1001") as error:
        parse_chat(body(1001))
    assert error.value.param == "chat_template_kwargs"

"""Bodies whose parts are many or long are refused without work that grows with them on the server's loop."""

from __future__ import annotations

import difflib
from typing import Any

import pytest

from tokenspeed.errors import RequestError
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

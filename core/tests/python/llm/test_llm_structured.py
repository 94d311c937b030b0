"""``tokenspeed.LLM`` held to a form: the fields of a request to the server, a real process that compiles, the toy model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenspeed import LLM, SamplingParams
from tokenspeed.errors import ConfigError, RequestError
from tokenspeed.testing.plugins import PluginFolder

TINY = """
@hookimpl
def tokenspeed_grammar_backends():
    parts = 'tokenspeed.testing.tiny_grammar'
    return [GrammarBackendSpec(name='tiny', target=f'{parts}:TinyGrammarBackend', checker=f'{parts}:check')]
"""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with PluginFolder(tmp_path_factory.mktemp("site")) as folder:
        folder.add("tiny", TINY)
        with LLM("toy", plugins="tiny", num_threads=1) as made:
            yield made


def hot(**changes: object) -> SamplingParams:
    base = {"max_new_tokens": 40, "temperature": 1.5, "seed": 3}
    return SamplingParams(**(base | changes))  # type: ignore[arg-type]


def test_every_completion_has_the_form_that_was_asked_for(llm: LLM) -> None:
    results = llm.generate([f"prompt {i}" for i in range(6)], hot(), structured_outputs={"regex": "[a-f]+:[0-9][0-9]"})
    for result in results:
        assert result.finish in ("stop", "length")
        if result.finish == "stop":
            assert re.fullmatch("[a-f]+:[0-9]{2}", result.text)
        else:
            assert re.fullmatch("[a-f]+(:[0-9]?)?", result.text)
    assert {r.finish for r in results} != {"length"}
    assert all(result.stats is not None and result.stats.grammar_ms > 0 for result in results)


def test_a_form_is_taken_by_chat_and_stream_and_from_the_cache(llm: LLM) -> None:
    form = {"structured_outputs": {"choice": ["red", "green"]}}
    first = llm.chat([{"role": "user", "content": "Which?"}], hot(), **form)
    assert (first.text in ("red", "green"), first.finish) == (True, "stop")
    *_, last = llm.stream("Which?", hot(), **form)
    assert last.result is not None
    assert last.result.text in ("red", "green")
    assert last.result.stats is not None
    assert last.result.stats.grammar_ms == 0
    assert llm.generate("x", hot(), response_format={"type": "json_object"})[0].text.startswith("{")


def test_a_form_that_would_not_be_enforced_is_refused_before_anything_runs(llm: LLM) -> None:
    schema = {"name": "x", "schema": {"type": "integer"}}
    with pytest.raises(RequestError, match="only pattern is enforced") as caught:
        llm.generate("x", response_format={"type": "json_schema", "json_schema": schema})
    assert caught.value.param == "response_format.json_schema.schema"
    with pytest.raises(RequestError, match="give one"):
        llm.generate("x", response_format={"type": "json_object"}, structured_outputs={"regex": "a"})


@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 5}])
def test_what_cannot_be_kept_beside_a_form_is_refused_as_the_server_does(llm: LLM, field: dict[str, object]) -> None:
    (name,) = field
    with pytest.raises(RequestError, match=name) as caught:
        llm.generate(["x", "y"], [hot(), hot(**field)], structured_outputs={"regex": "a+"})
    assert caught.value.param == name
    assert llm.generate("x", hot(**field, max_new_tokens=6))[0].finish in ("length", "stop")


def test_a_grammar_that_the_engine_refuses_is_the_results_error(llm: LLM) -> None:
    (result,) = llm.generate("x", structured_outputs={"regex": r"\!raise"})
    assert (result.finish, result.text) == ("error", "")
    assert "something in a library broke" in result.error


def test_without_a_backend_the_way_to_one_is_told() -> None:
    with LLM("toy", plugins="none", num_threads=1) as plain, pytest.raises(RequestError, match="grammar-xgrammar"):
        plain.generate("x", structured_outputs={"regex": "a"})


def test_a_backend_that_was_named_needs_the_vocabulary(tmp_path: Path) -> None:
    with PluginFolder(tmp_path / "site") as folder:
        folder.add("tiny", TINY)
        flags = {"plugins": "tiny", "num_threads": 1, "skip_tokenizer_init": True}
        with pytest.raises(ConfigError, match=r"--grammar-backend tiny: .*no tokenizer is loaded"):
            LLM("toy", grammar_backend="tiny", **flags)
        with LLM("toy", **flags) as llm:
            with pytest.raises(RequestError, match="it needs the tokenizer, which --skip-tokenizer-init leaves out"):
                llm.generate([[1, 2]], structured_outputs={"regex": "a"})
            assert llm.generate([[1, 2]])[0].error == ""

"""Mistral formats: the rules of both suites, and what is special here."""

from __future__ import annotations

import json
import re

import pytest
from tokenspeed_plugin_parsers_mistral.reasoning import MistralReasoningParser
from tokenspeed_plugin_parsers_mistral.tools import MistralToolParser

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.testing.reasoning_parser import ReasoningParserSuite, ReasoningSample
from tokenspeed.testing.tool_parser import Sample, ToolParserSuite, parse
from tokenspeed.testing.tool_parser_gaps import ToolParserGaps

ARRAY = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3, "b": -4}}]'
NAMED = '[TOOL_CALLS]add[ARGS]{"a": 3}[TOOL_CALLS]add[ARGS]{"a": 4}'


class TestMistral(ToolParserSuite):
    parser = MistralToolParser
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    samples = (
        Sample(ARRAY, calls=(("add", {"a": 3, "b": -4}),), verbatim=('{"a": 3, "b": -4}',)),
        Sample(
            '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"t": "]"}, "id": "VvvODy9mT"}]',
            calls=(("a", {}), ("b", {"t": "]"})),
        ),
        Sample(NAMED, calls=(("add", {"a": 3}), ("add", {"a": 4}))),
        Sample('[TOOL_CALLS]add[CALL_ID]abcDEF123[ARGS]{"a": 3}', calls=(("add", {"a": 3}),)),
        Sample('[TOOL_CALLS]add{"a": "[TOOL_CALLS]"}', calls=(("add", {"a": "[TOOL_CALLS]"}),)),
        Sample('Sure. [TOOL_CALLS]add[ARGS]{"a": 3}</s>', content="Sure.", calls=(("add", {"a": 3}),)),
        Sample(ARRAY + " Done.", content="Done.", calls=(("add", {"a": 3, "b": -4}),)),
    )


class TestArrayGaps(ToolParserGaps):
    parser = MistralToolParser
    quotable = "a [TOOL_CALLS] [ARGS] b"

    def render(self, calls):
        return "[TOOL_CALLS]" + json.dumps(
            [{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False
        )


class TestNamedGaps(TestArrayGaps):
    def render(self, calls):
        return "".join(
            f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}" for name, arguments in calls
        )


@pytest.mark.parametrize(
    "text",
    [ARRAY, NAMED, "[TOOL_CALLS]a[CALL_ID]bad id[ARGS]{}", '[TOOL_CALLS][{"id": "x", "name": "a", "arguments": {}}]'],
)
def test_tool_13_ids_are_nine_letters_and_digits(text: str) -> None:
    """tool-13: every call has an id that the tokenizer library accepts, no two alike, and none depends on how the text was cut."""
    whole = parse(MistralToolParser(ParserContext()), [text])
    ids = [call[1] for call in whole.calls]
    assert all(re.fullmatch(r"[a-zA-Z0-9]{9}", item) for item in ids)
    assert len(set(ids)) == len(ids)
    assert parse(MistralToolParser(ParserContext()), list(text)) == whole
    later = parse(MistralToolParser(ParserContext(history_calls=len(ids))), [text])
    assert not set(ids) & {call[1] for call in later.calls}


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS]add[CALL_ID]abcDEF123[ARGS]{"a": 3}',
        '[TOOL_CALLS][{"id": "abcDEF123", "name": "add", "arguments": {"a": 3}}]',
    ],
)
def test_tool_13_an_id_of_the_model_is_kept(text: str) -> None:
    """tool-13: where the model writes a valid id before the call begins, it is the id."""
    assert parse(MistralToolParser(ParserContext()), [text]).calls == [["add", "abcDEF123", '{"a": 3}']]


def test_foreign_ids_of_the_history_become_valid() -> None:
    """A template that is given any other form refuses the conversation."""
    assert MistralToolParser.history_id("abcDEF123", "f", 0) == "abcDEF123"
    ids = {MistralToolParser.history_id(f"call_{index}", "f", index) for index in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(r"[a-zA-Z0-9]{9}", item) for item in ids)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("[TOOL_CALLS][1, 2]", "1, 2]"),
        ('[TOOL_CALLS][{"name": 5}]', '{"name": 5}]'),
        ("[TOOL_CALLS]two words{}", "two words{}"),
    ],
)
def test_a_malformed_call_becomes_content(text: str, content: str) -> None:
    """The text is there without the marker."""
    parsed = parse(MistralToolParser(ParserContext()), list(text))
    assert (parsed.finished(), parsed.content) == ([], content)


class TestReasoning(ReasoningParserSuite):
    parser = MistralReasoningParser
    markers = ("[THINK]", "[/THINK]")
    open_prompt = "[/INST][THINK]"
    plain_prompt = "[/INST]"
    samples = (
        ReasoningSample("[THINK]hm[/THINK]Paris", "hm", "Paris"),
        ReasoningSample("Paris", "", "Paris", "[THINK]example[/THINK] [INST]what is [THINK]?[/INST]"),
    )

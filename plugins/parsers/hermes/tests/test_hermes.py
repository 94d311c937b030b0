"""The hermes parser against the shared rules and the faults that were reported elsewhere."""

from __future__ import annotations

import json

import pytest
from tokenspeed_plugin_parsers_hermes.parser import HermesToolParser
from tokenspeed_plugin_parsers_hermes.plugin import tokenspeed_tool_parsers

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.plugins.selection import load_target
from tokenspeed.testing.tool_parser import Parsed, Sample, ToolParserSuite, parse

NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
QUOTES = '<tool_call>\n{"name": "write", "arguments": {"body": "use </tool_call> here"}}\n</tool_call>'
SHELL = '<tool_call>\n{"name": "sh", "arguments": {"cmd": "mkdir -p a/{x,y"}}\n</tool_call>'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def read(text: str) -> Parsed:
    return parse(HermesToolParser(ParserContext()), [text])


class TestHermesRules(ToolParserSuite):
    parser = HermesToolParser
    markers = ("<tool_call>", "</tool_call>")
    samples = (
        Sample(NOW, calls=(("now", {}),), verbatim=("{}",)),
        Sample(f"{QUOTES}\n{NOW}", calls=(("write", {"body": "use </tool_call> here"}), ("now", {}))),
        Sample(SHELL, calls=(("sh", {"cmd": "mkdir -p a/{x,y"}),)),
        Sample(f"I will look.\n{NOW}\nDone.", calls=(("now", {}),), content="I will look.Done."),
        Sample(
            call("größe", '{"Schlüssel": "\\u00fc \\ud83d\\ude00 😀"}'), calls=(("größe", {"Schlüssel": "ü 😀 😀"}),)
        ),
        Sample(
            call("n", '{"n": 123456789012345678901, "x": [1.50, {"a": [null, "}"]}]}'),
            verbatim=('{"n": 123456789012345678901, "x": [1.50, {"a": [null, "}"]}]}',),
            calls=(("n", {"n": 123456789012345678901, "x": [1.5, {"a": [None, "}"]}]}),),
        ),
        Sample('<tool_call>{"arguments": {"a": 1}, "name": "late"}</tool_call>', calls=(("late", {"a": 1}),)),
        Sample('<tool_call>\n{"name": "bare"}\n</tool_call>', calls=(("bare", {}),)),
        Sample(
            '<tool_call>\n{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {}}\n</tool_call>',
            calls=(("a", {}), ("b", {})),
        ),
        Sample('<tool_call>\n{"name": "slip", "arguments": {"a": 1}}}\n</tool_call>', calls=(("slip", {"a": 1}),)),
        Sample('<tool_call>\n{"name": "open", "arguments": {}}', calls=(("open", {}),)),
    )


@pytest.mark.parametrize("size", [1, 2, 5, 17, 1000])
def test_tool_01_empty_arguments_stay_an_object(size: int) -> None:
    """tool-01: a call without arguments streams '{}' exactly as it does whole."""
    pieces = [NOW[at : at + size] for at in range(0, len(NOW), size)]
    assert parse(HermesToolParser(ParserContext()), pieces).calls == [["now", None, "{}"]]


def test_tool_03_a_quoted_closing_tag_is_data() -> None:
    """tool-03: the tag inside a string survives, and so does the call behind it."""
    assert read(f"{QUOTES}\n{NOW}").finished() == [("write", {"body": "use </tool_call> here"}), ("now", {})]


def test_tool_04_braces_in_strings_are_data_and_malformed_json_is_content() -> None:
    """tool-04: unbalanced braces in a string are kept, and what is no JSON becomes content without raising."""
    assert parse(HermesToolParser(ParserContext()), list(SHELL)).finished() == [("sh", {"cmd": "mkdir -p a/{x,y"})]
    broken = read('<tool_call>\n{"name": nope}\n</tool_call> and then')
    assert broken.calls == []
    assert broken.content == '{"name": nope}and then'


@pytest.mark.parametrize("text", ["a < b", "[1, 2]", '{"k":1}', "<tool", "</tool_cal", "<tool_call", "<<tool"])
def test_tool_25_beginnings_of_markers_are_text_when_nothing_follows(text: str) -> None:
    """tool-25: what never becomes a marker is released, at the latest at the end."""
    assert parse(HermesToolParser(ParserContext()), list(text)) == Parsed(content=text)


def test_ops_18_many_openings_take_linear_time() -> None:
    """ops-18: 50,000 markers without a terminator; the suite's time rule covers growth."""
    assert read("<tool_call>" * 50_000).calls == []


def test_arguments_are_told_while_they_arrive() -> None:
    """A client sees the name as soon as arguments begin and the pieces as the model writes them, not all at the end."""
    parser, parsed, seen = HermesToolParser(ParserContext()), Parsed(), []
    for char in call("write", '{"body": "0123456789"}'):
        parsed.take(parser.feed(char))
        seen.append(parsed.calls[0][2] if parsed.calls else None)
    assert {'{"body": "0', '{"body": "01', '{"body": "012'} <= set(seen)


def test_long_arguments_stay_whole() -> None:
    """A file of 100 kB as an argument."""
    body = json.dumps({"body": "x {}<tool_call>\n" * 6000})
    assert read(call("write", body)).calls == [["write", None, body]]


def test_the_spec_names_the_parser_and_its_aliases() -> None:
    """``--tool-call-parser hermes`` finds the class; so do the names of the families that use the format."""
    (spec,) = tokenspeed_tool_parsers()
    assert load_target(spec.target) is HermesToolParser
    assert "qwen25" in spec.aliases

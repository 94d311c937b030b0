"""Bare JSON calls: the rules of both suites."""

from __future__ import annotations

import json

from tokenspeed_plugin_parsers_json.tools import JsonToolParser

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.testing.tool_parser import Parsed, Sample, ToolParserSuite, parse
from tokenspeed.testing.tool_parser_gaps import ToolParserGaps


class TestJson(ToolParserSuite):
    parser = JsonToolParser
    markers = ('{"name": "',)
    samples = (
        Sample('{"name": "now", "arguments": {}}', calls=(("now", {}),), verbatim=("{}",)),
        Sample(
            '[{"name": "a", "arguments": {"x": [1]}}, {"name": "b", "parameters": {}}]',
            calls=(("a", {"x": [1]}), ("b", {})),
        ),
        Sample('Here:\n{"name": "a", "arguments": null}\nDone.', content="Here:Done.", calls=(("a", {}),)),
    )

    def test_no_marker_in_content(self) -> None:
        """The format has no markers: a call that is cut in its head is the text that came."""
        for text in ('{"name": "no', '[{"name"', '{"name": "now", "arguments"'):
            assert parse(JsonToolParser(ParserContext()), list(text)) == Parsed(content=text)


class TestJsonGaps(ToolParserGaps):
    parser = JsonToolParser
    quotable = 'a {"name": "b", "arguments": {}} c'

    def render(self, calls):
        return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False)


def test_a_head_that_is_too_long_is_content() -> None:
    """An object is held back for so long, then it is text; where it was cut makes no difference."""
    text = '{"name": "' + "x" * 3000 + '", "arguments": {}}'
    whole = parse(JsonToolParser(ParserContext()), [text])
    assert whole == Parsed(content=text)
    assert parse(JsonToolParser(ParserContext()), [text[:700], text[700:1500], text[1500:]]) == whole


def test_an_answer_in_json_is_content() -> None:
    """Objects that only resemble calls come back as they are."""
    for text in (
        '{"name": "Bob", "age": 5}',
        '{"name": {"first": "Bob"}}',
        '{"id": 5, "name": "x"}',
        '[{"name": "Bob"}]',
    ):
        assert parse(JsonToolParser(ParserContext()), list(text)) == Parsed(content=text)

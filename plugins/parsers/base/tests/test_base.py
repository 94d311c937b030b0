"""The parsers that find nothing."""

from __future__ import annotations

from tokenspeed_plugin_parsers_base.parsers import BaseReasoningParser, PassthroughToolParser

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.reasoning import ReasoningContext
from tokenspeed.testing.reasoning_parser import separate
from tokenspeed.testing.tool_parser import Parsed, parse

TEXT = '<think>a</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'


def test_all_text_is_content() -> None:
    """Whatever it holds, cut anywhere."""
    assert parse(PassthroughToolParser(ParserContext()), list(TEXT)) == Parsed(content=TEXT)
    assert separate(BaseReasoningParser(ReasoningContext(prompt_tail="<think>")), list(TEXT)) == ("", TEXT)

"""MiniMax formats: the rules of both suites, and what is special here."""

from __future__ import annotations

import json

import pytest
from tokenspeed_plugin_parsers_minimax.reasoning import MiniMaxAppendThinkParser, MiniMaxReasoningParser
from tokenspeed_plugin_parsers_minimax.tools import MiniMaxToolParser

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.reasoning import ReasoningContext
from tokenspeed.testing.reasoning_parser import ReasoningParserSuite, ReasoningSample, separate
from tokenspeed.testing.tool_parser import Parsed, Sample, ToolParserSuite, parse
from tokenspeed.testing.tool_parser_gaps import ToolParserGaps, function

SAY = (function("say", v={"anyOf": [{"type": "string"}, {"type": "null"}]}),)


def wrapped(*calls: tuple[str, dict]) -> str:
    invokes = []
    for name, arguments in calls:
        parameters = "".join(
            f'<parameter name="{key}">{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</parameter>\n'
            for key, value in arguments.items()
        )
        invokes.append(f'<invoke name="{name}">\n{parameters}</invoke>')
    return "<minimax:tool_call>\n" + "\n".join(invokes) + "\n</minimax:tool_call>"


class TestMiniMax(ToolParserSuite):
    parser = MiniMaxToolParser
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")
    samples = (
        Sample(wrapped(("now", {})), calls=(("now", {}),), verbatim=("{}",)),
        Sample(wrapped(("a", {"q": "x &amp; <y>\n"}), ("b", {})), calls=(("a", {"q": "x &amp; <y>\n"}), ("b", {}))),
        Sample(
            "I look.\n" + wrapped(("a", {"q": "1"})) + "\n" + wrapped(("b", {})),
            content="I look.",
            calls=(("a", {"q": "1"}), ("b", {})),
        ),
        Sample(wrapped(("a", {"q": '<parameter name="r">'})), calls=(("a", {"q": '<parameter name="r">'}),)),
        Sample(
            '<minimax:tool_call><invoke name="a"><invoke name="b"></minimax:tool_call>', calls=(("a", {}), ("b", {}))
        ),
    )


class TestMiniMaxGaps(ToolParserGaps):
    parser = MiniMaxToolParser

    def render(self, calls):
        return wrapped(*calls)


@pytest.mark.parametrize(("text", "value"), [("hi", "hi"), ("null", None), ("5", "5")])
def test_tool_24_string_or_null(text: str, value: object) -> None:
    """tool-24: the word null is null, any other text is itself."""
    assert parse(MiniMaxToolParser(ParserContext(tools=SAY)), [wrapped(("say", {"v": text}))]).finished() == [
        ("say", {"v": value})
    ]


def test_xml_outside_a_wrapper_is_text() -> None:
    """An invoke element that no wrapper announces is somebody's XML."""
    text = '<invoke name="a">\n<parameter name="k">v</parameter>\n</invoke>'
    assert parse(MiniMaxToolParser(ParserContext()), [text]) == Parsed(content=text)


class TestReasoning(ReasoningParserSuite):
    parser = MiniMaxReasoningParser
    markers = ("<think>", "</think>")
    open_prompt = "]~b]ai\n<think>\n"
    plain_prompt = "]~b]ai\n"
    samples = (
        ReasoningSample("hm\n</think>\n\nParis", "hm", "Paris", open_prompt),
        ReasoningSample("Paris", "", "Paris", "<think>\nold\n</think>[e~[\n]~b]ai\n"),
    )


@pytest.mark.parametrize("pieces", [lambda text: [text], list])
def test_append_think_keeps_the_block_in_the_content(pieces) -> None:
    """The template wants the block back, so nothing is taken out, and the tag that stood in the prompt is put before it."""
    parser = MiniMaxAppendThinkParser(ReasoningContext(prompt_tail="]~b]ai\n<think>\n"))
    assert separate(parser, pieces("hm\n</think>\n\nParis")) == ("", "<think>\nhm\n</think>\n\nParis")
    parser = MiniMaxAppendThinkParser(ReasoningContext(prompt_tail="]~b]ai\n"))
    assert separate(parser, pieces("Paris")) == ("", "Paris")

"""The harmony format: the rules of both suites, and what is special here."""

from __future__ import annotations

import json

import pytest
from tokenspeed_plugin_parsers_gpt_oss.parsers import HarmonyReasoningParser, HarmonyToolParser

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.reasoning import ReasoningContext
from tokenspeed.testing.reasoning_parser import ReasoningParserSuite, ReasoningSample, separate
from tokenspeed.testing.tool_parser import Parsed, Sample, ToolParserSuite, parse
from tokenspeed.testing.tool_parser_gaps import ToolParserGaps

PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
NEXT = "<|start|>assistant"


def read(text: str, prompt: str = PROMPT) -> Parsed:
    whole = parse(HarmonyToolParser(ParserContext(prompt_tail=prompt)), [text])
    assert parse(HarmonyToolParser(ParserContext(prompt_tail=prompt)), list(text)) == whole
    return whole


class TestTools(ToolParserSuite):
    parser = HarmonyToolParser
    prompt_tail = "<|start|>assistant"
    markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    samples = (
        Sample(CALL.format("now", "{}"), calls=(("now", {}),), verbatim=("{}",)),
        Sample(
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + CALL.format("a", '{"t": "<|call|>"}'),
            calls=(("a", {"t": "<|call|>"}),),
        ),
        Sample(CALL.format("a", "{}") + NEXT + CALL.format("b", '{"x": 1}'), calls=(("a", {}), ("b", {"x": 1}))),
        Sample(
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Paris<|return|>",
            content="Paris",
        ),
        Sample(
            "<|channel|>commentary<|message|>I look.<|end|>" + NEXT + CALL.format("a", "{}"),
            content="I look.",
            calls=(("a", {}),),
        ),
    )

    def make(self, tools=()):
        return HarmonyToolParser(ParserContext(tools=tools, prompt_tail=PROMPT))

    def test_a_call_made_twice_is_two_calls(self) -> None:
        """The same message twice over is two calls."""
        message = CALL.format("a", '{"x": 1}')
        assert read(message + NEXT + message).finished() == [("a", {"x": 1})] * 2


class TestGaps(ToolParserGaps):
    parser = HarmonyToolParser
    quotable = "a <|call|> b"
    alphabet = ToolParserGaps.alphabet + "<|>"

    def render(self, calls):
        return NEXT.join(CALL.format(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls)


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>commentary to=functions.web-find<|constrain|>json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.web-find json<|message|>{}<|call|>",
        " to=functions.web-find<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
        "<|start|>assistant to=functions.web-find<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
        "<|channel|>analysis to=functions.web-find <|constrain|>json<|message|>{}<|call|>",
        "<|channel|>analysis<|channel|>commentary to=functions.web-find<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.web-find <|constrain|>json{}<|call|>",
        "<|channel|>commentary to=functions.web-find<|message|><|call|>",
        "<|channel|>commentary to=functions.web-find<|message|>{}",
    ],
)
def test_tool_22_headers_that_are_slightly_wrong(text: str) -> None:
    """tool-22: the recipient is found wherever it stands, with or without the constraint's token."""
    parsed = read(text)
    assert (parsed.finished(), parsed.content) == ([("web-find", {})], "")


def test_names_of_the_protocol_are_functions_within_their_namespace() -> None:
    """``user`` alone is a role; ``functions.user`` is what a request may declare."""
    assert read("<|channel|>commentary to=functions.user<|message|>{}<|call|>").finished() == [("user", {})]
    assert read("<|channel|>commentary to=user<|message|>{}<|end|>").finished() == []


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<|channel|>commentary?<|message|>So.<|end|>", "So."),
        ("<|channel|>final<|channel|>final<|message|>So.<|return|>", "So."),
        ("<|channel|>final So.<|return|>", "So."),
        ("<|message|>So.<|end|>", "So."),
        ("So.", "So."),
        ("<|channel|>commentary to=functions.a<|message|>not json<|call|>", "not json"),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", "{}"),
    ],
)
def test_tool_22_what_is_no_call_is_content(text: str, content: str) -> None:
    """tool-22: text whose header cannot be used is shown, never an error."""
    parsed = read(text)
    assert (parsed.finished(), parsed.content) == ([], content)


def test_built_in_tools_keep_their_full_name() -> None:
    """``browser.search`` is not a function of the request; its name is passed on whole."""
    assert read(
        '<|channel|>commentary to=browser.search <|constrain|>code<|message|>{"query": "x"}<|call|>'
    ).finished() == [("browser.search", {"query": "x"})]


def test_the_tool_parser_reads_reasoning_too() -> None:
    """One machine reads both; reasoning is told apart, never as content."""
    parsed = read("<|channel|>analysis<|message|>need it<|end|><|start|>assistant" + CALL.format("web-find", "{}"))
    assert (parsed.reasoning, parsed.content, parsed.finished()) == ("need it", "", [("web-find", {})])


class TestReasoning(ReasoningParserSuite):
    parser = HarmonyReasoningParser
    markers = TestTools.markers
    open_prompt = PROMPT + "<|channel|>analysis<|message|>"
    plain_prompt = PROMPT
    samples = (
        ReasoningSample(
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Paris<|return|>",
            "hm",
            "Paris",
            PROMPT,
        ),
        ReasoningSample("<|channel|>commentary<|message|>I look.<|end|>", "", "I look.", PROMPT),
        ReasoningSample("hm<|end|><|start|>assistant<|channel|>final<|message|>Paris", "hm", "Paris", open_prompt),
        ReasoningSample("ris", "", "ris", PROMPT + "<|channel|>final<|message|>Pa"),
    )


def test_calls_are_content_where_no_tool_parser_reads_them() -> None:
    """With the reasoning parser alone the arguments of a call are shown as text, without markup."""
    parser = HarmonyReasoningParser(ReasoningContext(prompt_tail=PROMPT))
    assert separate(parser, list(CALL.format("a", '{"x": 1}'))) == ("", '{"x": 1}')

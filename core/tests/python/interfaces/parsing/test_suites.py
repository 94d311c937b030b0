"""The conformance suites of parsers fail for parsers that break their contract, each in one way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tokenspeed.interfaces.parser import ParserContext, ParserDelta, ToolCallDelta
from tokenspeed.interfaces.parsing import MarkedJsonParser, MarkedSyntax, TagReasoningParser, structural
from tokenspeed.interfaces.reasoning import ReasoningContext, ReasoningDelta
from tokenspeed.testing.reasoning_parser import ReasoningParserSuite, ReasoningSample
from tokenspeed.testing.tool_parser import ToolParserSuite

WALK = "test_what_a_structural_tag_lets_through_is_read_as_calls"
CUT = "test_a_cut_closing_tag_is_no_content"
SPANS = "test_where_tokens_tell_the_markers_text_is_none"
END = "test_an_end_from_outside_loses_nothing"
ANSWER = "test_an_answer_behind_its_reasoning_is_read_as_the_answer"


class Sound(MarkedJsonParser):
    """``<fn=NAME>{..}</fn>``."""

    syntax = MarkedSyntax(
        begin=("<fn=",), end=("</fn>",), around=(), header=re.compile(r"(?P<name>[\w.-]+)>"), closers=re.compile(r"\s*")
    )
    announcements = ("<fn=",)
    begin = "<fn={}>"
    end = "</fn>"

    def identify(self, header: re.Match[str]) -> tuple[str, str | None]:
        return header["name"], None

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        return structural.calls(
            structural.functions(tools, names),
            lambda name, parameters: structural.tag(cls.begin.format(name), structural.schema(parameters), cls.end),
            required=required,
            parallel=parallel,
            separator="\n",
            triggers=(cls.begin.partition("{")[0],),
        )


class OtherMarkup(Sound):
    """Its tag writes calls in a form that it does not read."""

    begin = "[[fn={}]]"


class AnyArguments(Sound):
    """Its tag lets any object through, whatever the tools declare."""

    @classmethod
    def structural_tag(cls, tools: Sequence[Mapping[str, Any]], **how: Any) -> Mapping[str, Any] | None:
        return super().structural_tag(
            [{"function": {"name": tool["function"]["name"], "parameters": {"type": "object"}}} for tool in tools],
            **how,
        )


class AnyFunction(Sound):
    """Its tag lets functions through that may not be called."""

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        return super().structural_tag(tools, required=required, parallel=parallel)


class AlwaysParallel(Sound):
    """Its tag lets several calls through where one is allowed."""

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        return super().structural_tag(tools, names=names, required=required, parallel=True)


class TextBeside(Sound):
    """Its tag lets text stand behind calls that are required."""

    @classmethod
    def structural_tag(cls, tools: Sequence[Mapping[str, Any]], **how: Any) -> Mapping[str, Any] | None:
        tag = super().structural_tag(tools, **how)
        assert tag is not None
        return structural.structural_tag(structural.sequence(tag["format"], structural.text("<fn=")))


class ValuesEndAtTags(Sound):
    """It cuts arguments at the first closing tag, also where a string quotes it."""

    def __init__(self, ctx: ParserContext) -> None:
        super().__init__(ctx)
        self._seen = ""

    def feed(self, text: str) -> ParserDelta:
        self._seen += text
        return ParserDelta()

    def finish(self) -> ParserDelta:
        found = re.findall(r"<fn=([\w.-]+)>(.*?)</fn>", self._seen, re.DOTALL)
        return ParserDelta(
            calls=tuple(ToolCallDelta(index=at, name=name, arguments=text) for at, (name, text) in enumerate(found))
        )


class LeaksItsEnd(Sound):
    """It tells the beginning of a closing tag as text."""

    outside = False


def run(suite: type, test: str, **attributes: Any) -> None:
    getattr(type("Suite", (suite,), attributes)(), test)()


def tools(parser: type[Sound], test: str) -> None:
    run(ToolParserSuite, test, parser=parser, markers=("<fn=", "</fn>"), samples=())


@pytest.mark.parametrize("test", [WALK, CUT])
def test_a_sound_tool_parser_passes(test: str) -> None:
    tools(Sound, test)


@pytest.mark.parametrize(
    ("parser", "why"),
    [
        (OtherMarkup, "no call"),
        (AnyArguments, "do not fit"),
        (AnyFunction, "may not be called"),
        (AlwaysParallel, "more than one call"),
        (TextBeside, "text beside calls"),
        (ValuesEndAtTags, "not complete"),
    ],
)
def test_a_tag_that_its_parser_does_not_read_as_calls_fails(parser: type[Sound], why: str) -> None:
    """Each for the reason that the class states."""
    with pytest.raises(AssertionError, match=why):
        tools(parser, WALK)


def test_the_beginning_of_a_closing_tag_told_as_text_fails() -> None:
    with pytest.raises(AssertionError, match=r"content=.<"):
        tools(LeaksItsEnd, CUT)


def test_a_tag_of_parts_that_the_suite_cannot_write_is_named() -> None:
    """It is not passed over."""

    class Grammar(Sound):
        @classmethod
        def structural_tag(cls, tools: Sequence[Mapping[str, Any]], **how: Any) -> Mapping[str, Any] | None:
            return structural.structural_tag({"type": "grammar", "grammar": "root ::= x"})

    with pytest.raises(NotImplementedError, match="'grammar'"):
        tools(Grammar, WALK)


class Think(TagReasoningParser):
    """``<think>`` .. ``</think>``."""


class EveryTextCounts(Think):
    """It takes text for markers though it is told which tokens are."""

    def feed(self, text: str, marker_spans: Sequence[tuple[int, int]] | None = None) -> ReasoningDelta:
        return super().feed(text)


class LosesWhatItHolds(Think):
    """What it held back is gone when the reasoning is ended."""

    def end_reasoning(self) -> ReasoningDelta:
        super().end_reasoning()
        return ReasoningDelta()


class StaysInside(Think):
    """It goes on reasoning after it was told to end it."""

    def end_reasoning(self) -> ReasoningDelta:
        return ReasoningDelta()


class NoEnd(Think):
    """It lets the answer begin inside the reasoning."""

    def answer_format(self, answer: Mapping[str, Any], token_ids: Mapping[str, int]) -> Mapping[str, Any]:
        return answer


class AlwaysCloses(Think):
    """It asks for an end tag where the prompt has closed the block, which is then text before the answer."""

    def answer_format(self, answer: Mapping[str, Any], token_ids: Mapping[str, int]) -> Mapping[str, Any]:
        return structural.sequence(structural.tag("", structural.text("</think>"), "</think>"), answer)


def reasoning(parser: type[Think], test: str) -> None:
    run(
        ReasoningParserSuite,
        test,
        parser=parser,
        markers=("<think>", "</think>"),
        open_prompt="<|im_start|>assistant\n<think>\n",
        plain_prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n",
        samples=(ReasoningSample("<think>hm</think>Paris", "hm", "Paris", "<|im_start|>assistant\n"),),
    )


@pytest.mark.parametrize("test", [SPANS, END, ANSWER])
def test_a_sound_reasoning_parser_passes(test: str) -> None:
    reasoning(Think, test)


@pytest.mark.parametrize(
    ("parser", "test"),
    [
        (EveryTextCounts, SPANS),
        (LosesWhatItHolds, END),
        (StaysInside, END),
        (NoEnd, ANSWER),
        (AlwaysCloses, ANSWER),
    ],
)
def test_a_reasoning_parser_that_breaks_its_contract_fails(parser: type[Think], test: str) -> None:
    """Each in the test that asks for what it breaks."""
    with pytest.raises(AssertionError):
        reasoning(parser, test)


def test_a_family_says_itself_what_begins_its_turns() -> None:
    """A start tag that a user quoted opens nothing where the family's turns have other markers."""

    class Gemma(Think):
        turn = re.compile(r"<start_of_turn>")

    quoted = "<start_of_turn>user\nWhat is <think>?<end_of_turn>\n<start_of_turn>model\n"
    assert not Gemma(ReasoningContext(prompt_tail=quoted)).inside
    assert Gemma(ReasoningContext(prompt_tail=f"{quoted}<think>\n")).inside

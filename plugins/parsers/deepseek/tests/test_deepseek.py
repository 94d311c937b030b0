"""DeepSeek formats: the rules of both suites, and what is special here."""

from __future__ import annotations

import json

import pytest
from tokenspeed_plugin_parsers_deepseek.dsml import DsmlToolParser
from tokenspeed_plugin_parsers_deepseek.reasoning import DeepSeekReasoningParser
from tokenspeed_plugin_parsers_deepseek.tools import DeepSeekV3ToolParser, DeepSeekV31ToolParser

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.testing.reasoning_parser import ReasoningParserSuite, ReasoningSample
from tokenspeed.testing.tool_parser import Sample, ToolParserSuite, parse
from tokenspeed.testing.tool_parser_gaps import ToolParserGaps, function

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def v3(*calls: tuple[str, str]) -> str:
    return (
        BEGIN
        + "\n".join(f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}" for name, arguments in calls)
        + END
    )


def v31(*calls: tuple[str, str]) -> str:
    return BEGIN + "\n".join(f"{CALL}{name}{SEP}{arguments}{CALL_END}" for name, arguments in calls) + END


def dsml(*calls: tuple[str, dict], wrapper: str = "function_calls") -> str:
    invokes = []
    for name, arguments in calls:
        parameters = "".join(
            f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
            f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )
        invokes.append(f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>')
    return f"<｜DSML｜{wrapper}>\n" + "\n".join(invokes) + f"\n</｜DSML｜{wrapper}>"


class TestV3(ToolParserSuite):
    parser = DeepSeekV3ToolParser
    markers = (BEGIN, END, CALL, SEP, CALL_END)
    samples = (
        Sample(v3(("now", "{}")), calls=(("now", {}),), verbatim=("{}",)),
        Sample(
            v3(("a", '{"x": [1, {"y": "`"}]}'), ("b", '{"q": "```"}')),
            calls=(("a", {"x": [1, {"y": "`"}]}), ("b", {"q": "```"})),
        ),
        Sample("Let me see." + v3(("now", "{}")), calls=(("now", {}),), content="Let me see."),
        Sample(
            v3(("quote", json.dumps({"t": CALL_END + END}, ensure_ascii=False))),
            calls=(("quote", {"t": CALL_END + END}),),
        ),
        Sample(v3(("slip", '{"a": 1}}')), calls=(("slip", {"a": 1}),)),
    )


class TestV31(ToolParserSuite):
    parser = DeepSeekV31ToolParser
    markers = (BEGIN, END, CALL, SEP, CALL_END)
    samples = (
        Sample(v31(("now", "{}")), calls=(("now", {}),), verbatim=("{}",)),
        Sample(v31(("a", '{"x": {"y": "}"}}'), ("b", "{}")), calls=(("a", {"x": {"y": "}"}}), ("b", {}))),
        Sample(f"{BEGIN}{CALL}none{SEP}{CALL_END}{END}", calls=(("none", {}),)),
        Sample(f"{CALL}open{SEP}" + '{"a": 1}', calls=(("open", {"a": 1}),)),
    )


class TestV31Gaps(ToolParserGaps):
    parser = DeepSeekV31ToolParser
    quotable = "a <｜tool▁call▁end｜> b"
    alphabet = ToolParserGaps.alphabet + "<｜▁>"

    def render(self, calls):
        return v31(*((name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls))


class TestV3Gaps(TestV31Gaps):
    parser = DeepSeekV3ToolParser

    def render(self, calls):
        return v3(*((name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls))


class TestDsml(ToolParserSuite):
    parser = DsmlToolParser
    markers = (
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        "<｜DSML｜tool_calls>",
        "<｜DSML｜invoke",
        "</｜DSML｜invoke>",
        "</｜DSML｜parameter>",
    )
    samples = (
        Sample(dsml(("a", {}), ("b", {"n": -7})), calls=(("a", {}), ("b", {"n": -7}))),
        Sample(dsml(("a", {"t": "001"}), wrapper="tool_calls"), calls=(("a", {"t": "001"}),)),
        Sample(
            "Looking.\n\n" + dsml(("a", {"t": 'x "y"\n<z>', "l": [1, {"k": None}]})),
            content="Looking.",
            calls=(("a", {"t": 'x "y"\n<z>', "l": [1, {"k": None}]}),),
        ),
        Sample(dsml(("a", {"t": "x"})).replace("</｜DSML｜parameter>", ""), calls=(("a", {"t": "x\n"}),)),
        Sample(
            '<｜DSML｜invoke name="typed">\n<｜DSML｜parameter name="n">5</｜DSML｜parameter></｜DSML｜invoke>',
            calls=(("typed", {"n": 5}),),
            tools=(function("typed", n={"type": "integer"}),),
        ),
    )


class TestDsmlGaps(ToolParserGaps):
    parser = DsmlToolParser

    def render(self, calls):
        return dsml(*calls)


@pytest.mark.parametrize(
    ("parser", "text"), [(DeepSeekV31ToolParser, v31(("now", "{}"))), (DeepSeekV3ToolParser, v3(("now", "{}")))]
)
def test_tool_15_begin_and_end_in_one_delta(parser, text: str) -> None:
    """tool-15: a call whose begin and end arrive together, or cut at any offset, is there."""
    for at in range(len(text)):
        assert parse(parser(ParserContext()), [text[:at], text[at:]]).finished() == [("now", {})]


def test_tool_16_three_invokes_in_two_chunks() -> None:
    """tool-16: every invoke keeps its name and index, wherever the stream is cut."""
    text = dsml(("a", {}), ("b", {"n": -7}), ("c", {"t": "x"}))
    for at in range(len(text)):
        assert parse(DsmlToolParser(ParserContext()), [text[:at], text[at:]]).finished() == [
            ("a", {}),
            ("b", {"n": -7}),
            ("c", {"t": "x"}),
        ]


def test_json_that_is_none_stays_text() -> None:
    """DSML: an argument that is said to be JSON and is not becomes a string."""
    text = dsml(("a", {"n": 1})).replace(">1<", ">one<")
    assert parse(DsmlToolParser(ParserContext()), [text]).finished() == [("a", {"n": "one"})]


@pytest.mark.parametrize("arguments", ['{"a": nope}', "[1]", '{"a": 1,}'])
def test_a_malformed_call_becomes_content(arguments: str) -> None:
    """Its text is there without markers, and what was told of it is no JSON object."""
    parsed = parse(DeepSeekV31ToolParser(ParserContext()), list(v31(("bad", arguments), ("good", "{}"))))
    assert parsed.finished() == [("good", {})]
    assert parsed.content.startswith("bad")
    assert parsed.content.endswith(arguments)


class TestReasoning(ReasoningParserSuite):
    parser = DeepSeekReasoningParser
    markers = ("<think>", "</think>")
    open_prompt = "<｜User｜>hi<｜Assistant｜><think>\n"
    plain_prompt = "<｜User｜>hi<｜Assistant｜></think>"
    samples = (
        ReasoningSample("a\n</think>\n\nb", "a", "b", open_prompt),
        ReasoningSample("b", "", "b", plain_prompt),
        ReasoningSample("<think>\na\n</think>\n\nb", "a", "b"),
        ReasoningSample("only thoughts", "only thoughts", "", open_prompt),
    )

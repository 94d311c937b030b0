"""Qwen formats: the rules of both suites, and what is special here."""

from __future__ import annotations

import json

import pytest
from tokenspeed_plugin_parsers_qwen.coder import QwenCoderToolParser
from tokenspeed_plugin_parsers_qwen.reasoning import QwenReasoningParser

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.parsing import ChoiceParser
from tokenspeed.interfaces.reasoning import ReasoningContext
from tokenspeed.testing.reasoning_parser import ReasoningParserSuite, ReasoningSample, separate
from tokenspeed.testing.tool_parser import Parsed, Sample, ToolParserSuite, parse
from tokenspeed.testing.tool_parser_gaps import ToolParserGaps, function

SAVE = (function("save", body={"type": "object"}),)
OPEN = "<tool_call>\n<function=save>\n<parameter=body>\n"


def call(name: str, arguments: dict) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def read(text: str, tools=()) -> Parsed:
    return parse(QwenCoderToolParser(ParserContext(tools=tools)), [text])


class TestCoder(ToolParserSuite):
    parser = QwenCoderToolParser
    markers = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")
    samples = (
        Sample(call("now", {}), calls=(("now", {}),), verbatim=("{}",)),
        Sample(
            call("sh", {"cmd": 'ls\n\necho </tool_call> &amp; "x"'}),
            calls=(("sh", {"cmd": 'ls\n\necho </tool_call> &amp; "x"'}),),
        ),
        Sample(
            "I look.\n" + call("a", {"x": "1"}) + "\n" + call("b", {}),
            content="I look.",
            calls=(("a", {"x": "1"}), ("b", {})),
        ),
        Sample(
            "<tool_call><function=f><parameter=k>inline</parameter></function></tool_call>",
            calls=(("f", {"k": "inline"}),),
        ),
        Sample(
            OPEN + '{"a": 1}\n</parameter>\n</function>\n</tool_call>',
            calls=(("save", {"body": {"a": 1}}),),
            tools=SAVE,
        ),
        Sample("<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</function>", calls=(("f", {"a": "1", "b": "2"}),)),
        Sample(
            "<tool_call>\n<function=f>\n<parameter=a>\n\nx\n\n</parameter>\n</tool_call>",
            calls=(("f", {"a": "\nx\n"}),),
        ),
    )


class TestCoderGaps(ToolParserGaps):
    parser = QwenCoderToolParser

    def render(self, calls):
        return "\n".join(call(name, arguments) for name, arguments in calls)


def test_tool_06_a_missing_closing_tag_ends_the_value_all_the_same() -> None:
    """tool-06: the value ends at the end of the call, and its object is complete however it was streamed."""
    text = OPEN + '{"a": 1}\n</function>\n</tool_call>'
    for pieces in ([text], list(text)):
        assert parse(QwenCoderToolParser(ParserContext(tools=SAVE)), pieces).finished() == [
            ("save", {"body": {"a": 1}})
        ]


@pytest.mark.parametrize("header", ["<parameter=\n", "<parameter=x\n", "<parameter=x=>", "<parameter=>"])
def test_tool_07_a_malformed_parameter_is_dropped(header: str) -> None:
    """tool-07: what has no usable header leaks neither as a key nor as content, and the rest of the call is complete."""
    text = f"<tool_call>\n<function=sh>\n<parameter=cmd>\nls\n</parameter>\n{header}echo hi\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([text], list(text)):
        parsed = parse(QwenCoderToolParser(ParserContext()), pieces)
        assert (parsed.finished(), parsed.content) == ([("sh", {"cmd": "ls"})], "")


def test_reason_09_text_of_others_is_left_alone() -> None:
    """reason-09: without a reasoning parser the tool parser does not touch reasoning tags."""
    assert read("plan</think>\n\nanswer") == Parsed(content="plan</think>\n\nanswer")


def test_a_repeated_parameter_counts_once() -> None:
    """The arguments never hold a key twice; the first value stands."""
    assert read("<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>").calls == [
        ["f", None, '{"a": "1"}']
    ]


def test_a_malformed_function_becomes_content() -> None:
    """No name, no call: the text is there without its tags."""
    parsed = read("<tool_call>\n<function=\nx</function>\n</tool_call>" + call("now", {}))
    assert parsed.finished() == [("now", {})]
    assert parsed.content == "x"


class TestReasoning(ReasoningParserSuite):
    parser = QwenReasoningParser
    markers = ("<think>", "</think>")
    open_prompt = "<|im_start|>assistant\n<think>\n"
    plain_prompt = "<|im_start|>assistant\n"
    samples = (
        ReasoningSample("<think>\nhm\n</think>\n\nParis", "hm", "Paris"),
        ReasoningSample("<think>\n\n</think>\n\nParis", "", "Paris"),
        ReasoningSample("hm\n\nso\n</think>\n\nParis", "hm\n\nso", "Paris", open_prompt),
        ReasoningSample("Paris", "", "Paris", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    )


@pytest.mark.parametrize("pieces", [lambda text: [text], list])
@pytest.mark.parametrize(
    ("prompt", "text", "want"),
    [
        ("<think>\n", "Paris", ("Paris", "")),
        ("<think>\n", "<think>a</think>Paris", ("a", "Paris")),
        ("<think>\n", "a</think>Paris", ("a", "Paris")),
        ("<think>\n", "<think>a", ("a", "")),
        ("", "Paris", ("", "Paris")),
        ("", "<think>a</think>Paris", ("a", "Paris")),
        ("", "a</think>Paris", ("", "aParis")),
        ("", "<think>a", ("a", "")),
    ],
)
def test_reason_01_the_prompt_decides_where_the_text_begins(
    prompt: str, text: str, want: tuple[str, str], pieces
) -> None:
    """reason-01: no open tag in the prompt and none in the output: all content. An open one and no end tag: all reasoning."""

    assert (
        separate(QwenReasoningParser(ReasoningContext(prompt_tail="<|im_start|>assistant\n" + prompt)), pieces(text))
        == want
    )


def test_reason_01_a_tag_that_the_user_wrote_opens_nothing() -> None:
    """reason-01: the user quotes the open tag, the template does not open it: the reply is content."""

    prompt = "<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert QwenReasoningParser(ReasoningContext(prompt_tail=prompt)).inside is False


def test_reason_03_only_the_token_closes_the_block_where_tokens_are_known() -> None:
    """reason-03: a tag that is spelled in the thoughts, or later in the answer, is text; the real one closes."""

    parser = QwenReasoningParser(ReasoningContext(prompt_tail="<think>\n"))
    first = parser.feed("the template looks for `</think>` in the turn\n", [])
    second = parser.feed("</think>\n\ndone, `<think>` closed", [(0, 8)])
    last = parser.finish()
    assert first.reasoning + second.reasoning == "the template looks for `</think>` in the turn"
    assert first.content + second.content + last.content == "done, `<think>` closed"


LOOKUP = (function("lookup", k={"type": "string"}),)
INSIDE = "<think>let me look\n<tool_call>\n<function=lookup>\n<parameter=k>\na\n</parameter>\n</function>\n</tool_call>\n</think>"


@pytest.mark.parametrize("pieces", [lambda text: [text], list])
@pytest.mark.parametrize(
    ("tools", "text", "reasoning", "calls"),
    [
        (LOOKUP, INSIDE, "let me look\n", [("lookup", {"k": "a"})]),
        (LOOKUP, INSIDE.removesuffix("\n</think>"), "let me look\n", [("lookup", {"k": "a"})]),
        ((), INSIDE, INSIDE.removeprefix("<think>").removesuffix("\n</think>"), []),
        (LOOKUP, INSIDE[:50], INSIDE[7:50], []),
    ],
    ids=["complete", "no-end-tag", "undeclared", "cut"],
)
def test_reason_04_a_call_inside_an_open_block(tools, text: str, reasoning: str, calls: list, pieces) -> None:
    """reason-04: a complete call of a declared tool ends the reasoning and is returned; an undeclared or cut one stays reasoning."""
    parser = ChoiceParser(QwenReasoningParser, QwenCoderToolParser, ParserContext(tools=tools))
    parsed = Parsed()
    for piece in pieces(text):
        parsed.take(parser.feed(piece))
    parsed.take(parser.finish())
    assert (parsed.reasoning, parsed.content, parsed.finished()) == (reasoning, "", calls)

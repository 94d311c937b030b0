"""Kimi formats: the rules of both suites, and what is special here."""

from __future__ import annotations

import json

import pytest
from tokenspeed_plugin_parsers_kimi.reasoning import KimiK2ReasoningParser, KimiReasoningParser
from tokenspeed_plugin_parsers_kimi.tools import KimiK2ToolParser
from tokenspeed_plugin_parsers_kimi.xtml import KimiK3ReasoningParser, KimiK3ToolParser

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.reasoning import ReasoningContext
from tokenspeed.testing.reasoning_parser import ReasoningParserSuite, ReasoningSample, separate
from tokenspeed.testing.tool_parser import Parsed, Sample, ToolParserSuite, parse
from tokenspeed.testing.tool_parser_gaps import ToolParserGaps

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def calls(*items: tuple[str, str]) -> str:
    return BEGIN + "".join(f"{CALL}{head}{ARGUMENTS}{arguments}{CALL_END}" for head, arguments in items) + END


class TestK2(ToolParserSuite):
    parser = KimiK2ToolParser
    markers = (BEGIN, END, CALL, ARGUMENTS, CALL_END)
    samples = (
        Sample(calls(("functions.now:0", "{}")), calls=(("now", {}),), verbatim=("{}",)),
        Sample(calls(("functions.a:0", '{"x": "}"}'), ("functions.b:1", "{}")), calls=(("a", {"x": "}"}), ("b", {}))),
        Sample("Wait." + calls(("functions.a:0\n", "{}")), content="Wait.", calls=(("a", {}),)),
        Sample(calls(("a:0", "{}")).replace("tool_calls_section", "tool_call_section"), calls=(("a", {}),)),
        Sample(calls(("functions.q:0", json.dumps({"t": CALL_END + END}))), calls=(("q", {"t": CALL_END + END}),)),
    )


class TestK2Gaps(ToolParserGaps):
    parser = KimiK2ToolParser
    quotable = "a <|tool_call_end|> b"
    alphabet = ToolParserGaps.alphabet + "<|>"

    def render(self, calls_):
        return calls(
            *(
                (f"functions.{name}:{index}", json.dumps(arguments, ensure_ascii=False))
                for index, (name, arguments) in enumerate(calls_)
            )
        )

    def test_an_empty_name_is_no_call(self) -> None:
        """``functions.:0`` names nothing."""
        assert self.read(calls(("functions.", "{}"))).finished() == []


@pytest.mark.parametrize(
    ("head", "history", "want"),
    [
        ("functions.a:0", 0, "functions.a:0"),
        ("functions.a:3", 3, "functions.a:3"),
        ("functions.a:5", 3, "functions.a:5"),
        ("functions.a:0", 1, "functions.a:1"),
        ("a:0", 0, "functions.a:0"),
        ("functions.a", 2, "functions.a:2"),
        ("functions.srv:tool:0", 0, "functions.srv:tool:0"),
    ],
)
def test_tool_19_ids_keep_the_native_form_and_count_over_the_conversation(head: str, history: int, want: str) -> None:
    """tool-19: the model's id is the id, with an index that no earlier call has."""
    parsed = parse(KimiK2ToolParser(ParserContext(history_calls=history)), [calls((head, "{}"))])
    assert parsed.calls[0][1] == want


def test_tool_19_foreign_ids_of_the_history_are_rewritten() -> None:
    """tool-19: a native id stays, any other becomes one that counts over the conversation."""
    assert KimiK2ToolParser.history_id("functions.a:0", "a", 0) == "functions.a:0"
    assert KimiK2ToolParser.history_id("call_x", "b", 1) == "functions.b:1"


def test_tool_18_a_cut_section_keeps_its_finished_calls() -> None:
    """tool-18: without the end of the section the finished call is there; the unfinished one is no JSON object."""
    text = f'{BEGIN}{CALL}functions.a:0{ARGUMENTS}{{}}{CALL_END}{CALL}functions.b:1{ARGUMENTS}{{"x":'
    parsed = parse(KimiK2ToolParser(ParserContext()), [text])
    assert (parsed.finished(), parsed.content) == ([("a", {})], "")
    assert parsed.calls[1] == ["b", "functions.b:1", '{"x":']


class TestOldReasoning(ReasoningParserSuite):
    parser = KimiReasoningParser
    markers = ("◁think▷", "◁/think▷")
    samples = (
        ReasoningSample("◁think▷hm◁/think▷Paris", "hm", "Paris"),
        ReasoningSample("◁think▷hm", "hm", ""),
    )


class TestReasoning(ReasoningParserSuite):
    parser = KimiK2ReasoningParser
    markers = ("<think>", "</think>")
    open_prompt = "<|im_assistant|>assistant<|im_middle|><think>"
    plain_prompt = "<|im_assistant|>assistant<|im_middle|><think></think>"
    samples = (
        ReasoningSample("hm</think>Paris", "hm", "Paris", open_prompt),
        ReasoningSample("Paris", "", "Paris", plain_prompt),
    )


def xtml(*items: tuple[str, dict]) -> str:
    kinds = {
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
        list: "array",
        dict: "object",
    }
    text = ""
    for index, (name, arguments) in enumerate(items, 1):
        text += f'<|open|>call tool="{name}" index="{index}"<|sep|>'
        for key, value in arguments.items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>{written}<|close|>argument<|sep|>'
        text += "<|close|>call<|sep|>"
    return f"<|open|>tools<|sep|>{text}<|close|>tools<|sep|>"


class TestK3(ToolParserSuite):
    parser = KimiK3ToolParser
    markers = (
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        "<|close|>call<|sep|>",
        "<|close|>argument<|sep|>",
        "<|close|>message<|sep|>",
    )
    samples = (
        Sample(xtml(("now", {})), calls=(("now", {}),), verbatim=("{}",)),
        Sample(
            xtml(("a", {"t": " x < 1 ", "n": 2, "l": [None]}), ("b", {})),
            calls=(("a", {"t": " x < 1 ", "n": 2, "l": [None]}), ("b", {})),
        ),
        Sample(
            "<|open|>response<|sep|>On it.<|close|>response<|sep|>"
            + xtml(("a", {"t": "001"}))
            + "<|close|>message<|sep|><|end_of_msg|>",
            content="On it.",
            calls=(("a", {"t": "001"}),),
        ),
        Sample(xtml(("a", {"t": "x"})).replace("<|close|>argument<|sep|>", ""), calls=(("a", {"t": "x"}),)),
    )


class TestK3Gaps(ToolParserGaps):
    parser = KimiK3ToolParser

    def render(self, calls_):
        return xtml(*calls_)


class TestK3Reasoning(ReasoningParserSuite):
    parser = KimiK3ReasoningParser
    markers = (
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|end_of_msg|>",
    )
    open_prompt = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    plain_prompt = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    samples = (
        ReasoningSample(
            "hm<|close|>think<|sep|><|open|>response<|sep|>Paris<|close|>response<|sep|><|close|>message<|sep|>",
            "hm",
            "Paris",
            open_prompt,
        ),
        ReasoningSample("Paris<|close|>response<|sep|>", "", "Paris", plain_prompt),
    )


@pytest.mark.parametrize("tail", ["<|open|>", "<|close|>resp", "<|open|>think<|se"])
def test_a_k3_marker_that_a_limit_cuts_is_no_text(tail: str) -> None:
    """It is several tokens, the first of which is special, so that no text begins like it."""
    prompt = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    assert separate(KimiK3ReasoningParser(ReasoningContext(prompt_tail=prompt)), [f"Paris{tail}"]) == ("", "Paris")
    assert parse(KimiK3ToolParser(ParserContext()), ["Paris<|open|>too"]) == Parsed(content="Paris")
    assert parse(KimiK3ToolParser(ParserContext()), ["a <"]) == Parsed(content="a <")


def test_k3_reasoning_is_read_from_the_channel_that_the_last_message_opens() -> None:
    """Behind a closed thought the answer's channel is none of a turn; a thought of an earlier message opens nothing."""
    message = '<|open|>message role="assistant"<|sep|>'
    thought = "<|open|>think<|sep|>hm<|close|>think<|sep|>"
    assert not KimiK3ReasoningParser(ReasoningContext(prompt_tail=f"<|open|>think<|sep|>{message}")).inside
    closed = KimiK3ReasoningParser(ReasoningContext(prompt_tail=f"{message}{thought}<|open|>response<|sep|>"))
    assert "think" not in json.dumps(closed.answer_format({"type": "const_string", "value": "x"}, {}))

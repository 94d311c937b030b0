"""GLM formats: the rules of both suites, and what is special here."""

from __future__ import annotations

import json

import pytest
from tokenspeed_plugin_parsers_glm.reasoning import GlmReasoningParser
from tokenspeed_plugin_parsers_glm.tools import GlmToolParser

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.testing.reasoning_parser import ReasoningParserSuite, ReasoningSample
from tokenspeed.testing.tool_parser import Parsed, Sample, ToolParserSuite, parse
from tokenspeed.testing.tool_parser_gaps import ToolParserGaps, function

PUT = (
    function(
        "put",
        id={"type": "string"},
        n={"type": "integer"},
        flags={"type": "array"},
        ok={"type": "boolean"},
        opt={"type": ["string", "null"]},
    ),
)


def call(name: str, arguments: dict, line: str = "\n") -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>{line}<arg_value>{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</arg_value>{line}"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{line}{pairs}</tool_call>"


def read(text: str, tools=()) -> Parsed:
    return parse(GlmToolParser(ParserContext(tools=tools)), [text])


class TestGlm(ToolParserSuite):
    parser = GlmToolParser
    markers = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|observation|>",
    )
    samples = (
        Sample(call("now", {}), calls=(("now", {}),), verbatim=("{}",)),
        Sample(call("now", {}, line=""), calls=(("now", {}),), verbatim=("{}",)),
        Sample(
            call("a", {"q": "x < y\n  z"}) + "\n" + call("b", {"q": "2"}, line=""),
            calls=(("a", {"q": "x < y\n  z"}), ("b", {"q": "2"})),
        ),
        Sample("Fine.\n" + call("a", {"q": "001"}) + "<|observation|>", content="Fine.", calls=(("a", {"q": "001"}),)),
        Sample("<tool_call>a<arg_key>k</arg_key><arg_value>v</tool_call>", calls=(("a", {"k": "v"}),)),
        Sample("<tool_call>a<arg_key></arg_key><arg_value>v</arg_value></tool_call>", calls=(("a", {}),)),
    )


class TestGlm45Gaps(ToolParserGaps):
    parser = GlmToolParser

    def render(self, calls):
        return "\n".join(call(name, arguments) for name, arguments in calls)


class TestGlm47Gaps(ToolParserGaps):
    parser = GlmToolParser

    def render(self, calls):
        return "".join(call(name, arguments, line="") for name, arguments in calls)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("id", "001", "001"),
        ("id", "true", "true"),
        ("id", "1e5", "1e5"),
        ("n", "9007199254740993", 9007199254740993),
        ("n", "NaN", "NaN"),
        ("n", "1.5", "1.5"),
        ("flags", "[]", []),
        ("ok", "true", True),
        ("opt", "null", None),
        ("opt", "hi", "hi"),
        ("opt", "5", "5"),
    ],
)
def test_tool_21_the_schema_gives_the_type(key: str, text: str, value: object) -> None:
    """tool-21: a value is what the schema says; a text that does not fit stays a text; big integers keep all digits."""
    assert read(call("put", {key: text}), PUT).finished() == [("put", {key: value})]


def test_a_json_body_is_no_call() -> None:
    """Calls in another family's form are content, without the tags."""
    assert read('<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>') == Parsed(
        content='{"name": "a", "arguments": {}}'
    )


class TestReasoning(ReasoningParserSuite):
    parser = GlmReasoningParser
    markers = ("<think>", "</think>")
    open_prompt = "<|user|>hi<|assistant|><think>"
    plain_prompt = "<|user|>hi<|assistant|>\n"
    samples = (
        ReasoningSample("\n<think>hm</think>\nParis", "hm", "\nParis"),
        ReasoningSample("hm</think>Paris", "hm", "Paris", open_prompt),
        ReasoningSample("Paris", "", "Paris", "<|assistant|></think>"),
    )

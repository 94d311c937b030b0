"""Harmony prompts: the suite's rules, and the exact text of the format."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from tokenspeed_plugin_parsers_gpt_oss.parsers import HarmonyToolParser
from tokenspeed_plugin_parsers_gpt_oss.renderer import HarmonyRenderer
from tokenspeed_plugin_parsers_gpt_oss.typescript import typescript

from tokenspeed.errors import RequestError
from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.renderer import RendererContext
from tokenspeed.testing.renderer import RendererSuite

HEAD = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2026-01-02\n\nReasoning: {effort}\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.{more}<|end|>"
)
TO_FUNCTIONS = "\nCalls to these tools must go to the commentary channel: 'functions'."
LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {}}}


def make() -> HarmonyRenderer:
    return HarmonyRenderer(RendererContext(), today=lambda: date(2026, 1, 2))


def call(name: str = "lookup", **arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


class TestHarmony(RendererSuite):
    def make(self) -> HarmonyRenderer:
        return make()


def test_a_plain_conversation() -> None:
    text = make().render(
        [
            {"role": "system", "content": "Rhyme."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello", "reasoning_content": "greet"},
            {"role": "user", "content": "Again", "name": "ann"},
        ],
        extra={"reasoning_effort": "high"},
    )
    assert text == (
        HEAD.format(effort="high", more="")
        + "<|start|>developer<|message|># Instructions\n\nRhyme.<|end|>"
        + "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Hello<|end|>"
        + "<|start|>user:ann<|message|>Again<|end|><|start|>assistant"
    )


def test_calls_keep_their_reasoning_until_a_final_answer_has_followed() -> None:
    turn = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "On it.", "reasoning_content": "need it", "tool_calls": [call(key=1)]},
        {"role": "tool", "content": "found", "tool_call_id": "lookup"},
    ]
    text = make().render(turn, tools=[LOOKUP])
    shown_call = (
        '<|start|>assistant<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"key":1}<|call|>'
    )
    assert text == (
        HEAD.format(effort="medium", more=TO_FUNCTIONS)
        + "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n"
        + "type lookup = () => any;\n\n} // namespace functions<|end|>"
        + "<|start|>user<|message|>Look<|end|>"
        + "<|start|>assistant<|channel|>analysis<|message|>need it<|end|>"
        + "<|start|>assistant<|channel|>commentary<|message|>On it.<|end|>"
        + shown_call
        + "<|start|>functions.lookup to=assistant<|channel|>commentary<|message|>found<|end|><|start|>assistant"
    )
    later = make().render([*turn, {"role": "assistant", "content": "Done"}, {"role": "user", "content": "More"}])
    assert "need it" not in later
    assert shown_call in later


def test_the_history_begins_with_what_the_model_wrote_so_that_its_pages_are_found_again() -> None:
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Look"}]
    prompt = make().render(talk, tools=[LOOKUP])
    written = (
        "<|channel|>analysis<|message|>need it<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"key":"a","n":[1,2]}<|call|>'
    )
    parser = HarmonyToolParser(ParserContext(tools=[LOOKUP], prompt_tail=prompt))
    first, last = parser.feed(written), parser.finish()
    assert first.reasoning + last.reasoning == "need it"
    talk += [
        {"role": "assistant", "content": "", "reasoning_content": "need it", "tool_calls": [call(key="a", n=[1, 2])]},
        {"role": "tool", "content": "found"},
    ]
    assert make().render(talk, tools=[LOOKUP]).startswith(prompt + written)


def test_a_wrong_effort_names_those_that_exist() -> None:
    with pytest.raises(RequestError, match="low, medium, high") as error:
        make().render([{"role": "user", "content": "Hi"}], extra={"reasoning_effort": "extreme"})
    assert error.value.param == "reasoning_effort"


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ({"type": "integer"}, "number"),
        ({"type": ["string", "integer"]}, "string | number"),
        ({"type": "string", "enum": ["a", "b"]}, '"a" | "b"'),
        ({"type": "array", "items": {"type": "boolean"}}, "boolean[]"),
        ({"type": "array"}, "Array<any>"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string | null"),
        ({}, "any"),
        (
            {
                "type": "object",
                "required": ["at"],
                "properties": {
                    "at": {"type": "string", "description": "Where."},
                    "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
                    "note": {"type": "string", "nullable": True, "default": "x", "examples": ["y"]},
                },
            },
            '{\n// Where.\nat: string,\nunit?: "c" | "f", // default: c\n'
            '// Examples:\n// - "y"\nnote?: string | null, // default: "x"\n}',
        ),
        (
            {
                "type": "object",
                "properties": {"one": {"oneOf": [{"type": "string"}, {"type": "number", "default": 2}]}},
            },
            "{\none?:\n | string\n | number // default: 2\n,\n}",
        ),
    ],
)
def test_schemas_as_types(schema: dict[str, Any], shown: str) -> None:
    assert typescript(schema) == shown

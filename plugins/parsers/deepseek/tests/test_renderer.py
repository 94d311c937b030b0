"""Prompts of DeepSeek V3.2: the suite's rules, and the exact text of the format."""

from __future__ import annotations

from typing import Any

import pytest
from tokenspeed_plugin_parsers_deepseek.dsml import DsmlToolParser
from tokenspeed_plugin_parsers_deepseek.renderer import DeepSeekV32Renderer

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.renderer import RendererContext
from tokenspeed.testing.renderer import RendererSuite
from tokenspeed.testing.tool_parser import parse

LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
CALLED = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="lookup">\n<｜DSML｜parameter name="key" string="true">a b</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">[1, 2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)


def make() -> DeepSeekV32Renderer:
    return DeepSeekV32Renderer(RendererContext())


def turn(**more: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "lookup", "arguments": {"key": "a b", "n": [1, 2]}}}
    return [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "", "tool_calls": [call], **more},
        {"role": "tool", "content": "found", "tool_call_id": "1"},
    ]


class TestDeepSeekV32(RendererSuite):
    def make(self) -> DeepSeekV32Renderer:
        return make()


def test_a_plain_conversation_without_thinking() -> None:
    text = make().render(
        [
            {"role": "system", "content": "Rhyme."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello", "reasoning_content": "greet"},
            {"role": "user", "content": "Again"},
        ]
    )
    assert text == (
        "<｜begin▁of▁sentence｜>Rhyme.<｜User｜>Hi<｜Assistant｜></think>Hello<｜end▁of▁sentence｜>"
        "<｜User｜>Again<｜Assistant｜></think>"
    )


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_thinking_opens_the_turn_and_keeps_its_reasoning_while_it_goes_on(name: str) -> None:
    text = make().render(turn(reasoning_content="need it"), extra={name: True})
    assert text == (
        "<｜begin▁of▁sentence｜><｜User｜>Look<｜Assistant｜><think>need it</think>\n\n"
        + CALLED
        + "<｜end▁of▁sentence｜>\n\n<function_results>\n<result>found</result>\n</function_results>\n\n<think>"
    )
    later = make().render(
        [
            *turn(reasoning_content="need it"),
            {"role": "assistant", "content": "Done"},
            {"role": "user", "content": "More"},
        ],
        extra={name: True},
    )
    assert "need it" not in later
    assert later.endswith("<｜User｜>More<｜Assistant｜><think>")


def test_the_parser_reads_calls_as_the_renderer_writes_them() -> None:
    parser = DsmlToolParser(ParserContext(tools=[LOOKUP]))
    (found,) = parse(parser, [CALLED]).calls
    assert found == ["lookup", None, '{"key": "a b", "n": [1, 2]}']


def test_results_stand_in_the_order_of_the_calls_which_carry_no_id() -> None:
    talk = turn()
    talk[1]["tool_calls"].append({**talk[1]["tool_calls"][0], "id": "2"})
    talk.insert(2, {"role": "tool", "content": "second", "tool_call_id": "2"})
    assert "<result>found</result>\n<result>second</result>" in make().render(talk)


def test_tools_stand_in_the_first_system_message() -> None:
    text = make().render([{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "Hi"}], tools=[LOOKUP])
    assert text.startswith("<｜begin▁of▁sentence｜>Rhyme.\n\n## Tools\n")
    assert '<functions>\n{"name": "lookup", "parameters": {"type": "object"}}\n</functions>\n<｜User｜>Hi' in text
    assert make().render(turn(), tools=[LOOKUP]).startswith("<｜begin▁of▁sentence｜>\n\n## Tools\n")

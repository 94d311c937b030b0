"""Kimi K2 tool calls: JSON between markers, where the header is the call's id."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.parsing import MarkedJsonParser, MarkedSyntax, structural

__all__ = ["KimiK2ToolParser"]

_NATIVE_ID = re.compile(r"functions\.\S+:[0-9]+")


class KimiK2ToolParser(MarkedJsonParser):
    """Ids are told in the form the model was trained on, ``functions.NAME:INDEX``.

    The index counts calls over the whole conversation. The model's own is kept unless an earlier call already has it; a missing prefix or index is
    filled in.
    """

    syntax = MarkedSyntax(
        begin=("<|tool_call_begin|>",),
        end=("<|tool_call_end|>",),
        around=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_section_begin|>",  # the singular occurs
            "<|tool_call_section_end|>",
            "<|im_end|>",
        ),
        separators=("<|tool_call_argument_begin|>",),
        header=re.compile(
            r"\s*(?:functions\.)?+(?P<name>\S+?)(?::(?P<index>[0-9]{1,9}))?\s*<\|tool_call_argument_begin\|>\s*"
        ),
    )
    needs_special_tokens = True
    announcements = (*syntax.begin, "<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        index = {"type": "regex", "pattern": "[0-9]{1,4}"}
        (begin,), (end,), (separator,) = cls.syntax.begin, cls.syntax.end, cls.syntax.separators
        section = cls.syntax.around[:2]
        return structural.calls(
            structural.functions(tools, names),
            lambda name, parameters: structural.tag(
                f"{begin}functions.{name}:",
                structural.sequence(index, structural.const(separator), structural.schema(parameters)),
                end,
            ),
            required=required,
            parallel=parallel,
            separator="",
            triggers=(section[0],),
            sections=((section[0], section[1]),),
            excludes=(begin, cls.syntax.around[2]),
        )

    def __init__(self, ctx: ParserContext) -> None:
        super().__init__(ctx)
        self._next_index = ctx.history_calls

    @classmethod
    def history_id(cls, call_id: str, name: str, index: int) -> str:
        """Foreign ids make the model leak its markers, so they are rewritten to the native form."""
        return call_id if _NATIVE_ID.fullmatch(call_id) else f"functions.{name}:{index}"

    def identify(self, header: re.Match[str]) -> tuple[str, str | None]:
        index = max(int(header["index"] or 0), self._next_index)
        self._next_index = index + 1
        return header["name"], f"functions.{header['name']}:{index}"

"""DeepSeek V3.2 and V4 tool calls: DSML elements, where each argument says itself whether it is text or JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parsing import ElementParser, ElementSyntax, structural

__all__ = ["DsmlToolParser"]

_OPEN, _CLOSE = "<｜DSML｜", "</｜DSML｜"

#: Names of arguments that a grammar may lead to: what the parser reads back.
_KEY = re.compile(r"[^\"<>\n]+")


class DsmlToolParser(ElementParser):
    """V3.2 wraps calls in ``function_calls``, V4 in ``tool_calls``; both are read."""

    syntax = ElementSyntax(
        wrapper_begin=(f"{_OPEN}function_calls>", f"{_OPEN}tool_calls>"),
        wrapper_end=(f"{_CLOSE}function_calls>", f"{_CLOSE}tool_calls>"),
        around=("<｜end▁of▁sentence｜>",),
        call_begin=f"{_OPEN}invoke",
        call_end=f"{_CLOSE}invoke>",
        argument_begin=f"{_OPEN}parameter",
        argument_end=f"{_CLOSE}parameter>",
        call_header=re.compile(r'\s+name="(?P<name>[^"\n]+)"\s*'),
        argument_header=re.compile(r'\s+name="(?P<name>[^"\n]+)"(?:\s+string="(?P<form>true|false)")?\s*'),
        bare=True,
        unclosed=True,
    )
    needs_special_tokens = True
    announcements = (*syntax.wrapper_begin, syntax.call_begin)

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        return structural.calls(
            structural.functions(tools, names, keys=_KEY),
            lambda name, parameters: structural.tag(
                f'{_OPEN}invoke name="{name}">\n',
                structural.schema(parameters, "deepseek_xml"),
                f"{_CLOSE}invoke>",
            ),
            required=required,
            parallel=parallel,
            separator="\n",
            triggers=cls.syntax.wrapper_begin,
            sections=[
                (f"{begin}\n", f"\n{end}")
                for begin, end in zip(cls.syntax.wrapper_begin, cls.syntax.wrapper_end, strict=True)
            ],
            excludes=(cls.syntax.call_begin,),
        )

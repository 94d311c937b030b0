"""Qwen3-Coder and Qwen3.5 tool calls: ``<function=NAME>`` and ``<parameter=KEY>`` elements with raw text, typed by the schema."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parsing import ElementParser, ElementSyntax, structural

__all__ = ["QwenCoderToolParser"]

#: Names of arguments that a grammar may lead to: what the parser reads back.
_KEY = re.compile(r"[^\s=<>\"][^=<>\"\n]*")


class QwenCoderToolParser(ElementParser):
    """Values are literal: no entity is decoded. One line break at each end belongs to the markup; a value on one line has none."""

    syntax = ElementSyntax(
        wrapper_begin=("<tool_call>",),
        wrapper_end=("</tool_call>",),
        call_begin="<function=",
        call_end="</function>",
        argument_begin="<parameter=",
        argument_end="</parameter>",
        call_header=re.compile(r"\s*(?P<name>[^\s=][^=]*?)\s*"),
        argument_header=re.compile(r"\s*(?P<name>[^\s=][^=]*?)\s*"),
        bare=True,  # these models forget the opening <tool_call> now and then
        trim=True,
        unclosed=True,
    )
    announcements = ("<tool_call>", "<function=")

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        return structural.calls(
            structural.functions(tools, names, keys=_KEY),
            lambda name, parameters: structural.tag(
                f"<tool_call>\n<function={name}>",
                structural.schema(parameters, "qwen_xml"),
                "</function>\n</tool_call>",
            ),
            required=required,
            parallel=parallel,
            separator="\n",
            triggers=("<tool_call>",),
            excludes=("<function=",),
        )

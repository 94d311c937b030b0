"""Qwen3-Coder and Qwen3.5 tool calls: ``<function=NAME>`` and ``<parameter=KEY>`` elements with raw text, typed by the schema."""

from __future__ import annotations

import re

from tokenspeed.interfaces.parsing import ElementParser, ElementSyntax

__all__ = ["QwenCoderToolParser"]


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

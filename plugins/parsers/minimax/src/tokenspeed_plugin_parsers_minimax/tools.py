"""MiniMax M2 tool calls: ``<invoke>`` and ``<parameter>`` elements with raw text, typed by the schema."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parsing import ElementParser, ElementSyntax, structural

__all__ = ["MiniMaxToolParser"]

#: Names of arguments that a grammar may lead to: what the parser reads back.
_KEY = re.compile(r"[^\"<>\n]+")


class MiniMaxToolParser(ElementParser):
    """Several invokes in one wrapper, or several wrappers.

    Values are literal, as the template writes them: ``&amp;`` stays. Outside a wrapper ``<invoke`` is somebody's XML.
    """

    syntax = ElementSyntax(
        wrapper_begin=("<minimax:tool_call>",),
        wrapper_end=("</minimax:tool_call>",),
        around=("[e~[",),
        call_begin="<invoke name=",
        call_end="</invoke>",
        argument_begin="<parameter name=",
        argument_end="</parameter>",
        call_header=re.compile(r'"(?P<name>[^"\n]+)"\s*'),
        argument_header=re.compile(r'"(?P<name>[^"\n]+)"\s*'),
    )
    needs_special_tokens = True
    announcements = ("<minimax:tool_call>",)

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        return structural.calls(
            structural.functions(tools, names, keys=_KEY),
            lambda name, parameters: structural.tag(
                f'<invoke name="{name}">\n', structural.schema(parameters, "minimax_xml"), "</invoke>"
            ),
            required=required,
            parallel=parallel,
            separator="\n",
            triggers=("<minimax:tool_call>",),
            sections=(("<minimax:tool_call>\n", "\n</minimax:tool_call>"),),
        )

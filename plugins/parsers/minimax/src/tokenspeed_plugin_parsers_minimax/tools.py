"""MiniMax M2 tool calls: ``<invoke>`` and ``<parameter>`` elements with raw text, typed by the schema."""

from __future__ import annotations

import re

from tokenspeed.interfaces.parsing import ElementParser, ElementSyntax

__all__ = ["MiniMaxToolParser"]


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

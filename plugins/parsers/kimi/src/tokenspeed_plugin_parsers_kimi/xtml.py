"""Kimi K3: reasoning, answer and tool calls as channels of one markup, XTML.

``<|open|>``, ``<|close|>`` and ``<|sep|>`` are special tokens; what stands between them is ordinary text, so a marker here is several tokens.
"""

from __future__ import annotations

import re

from tokenspeed.interfaces.parsing import ElementParser, ElementSyntax, TagReasoningParser

__all__ = ["KimiK3ReasoningParser", "KimiK3ToolParser"]


def _open(name: str) -> str:
    return f"<|open|>{name}<|sep|>"


def _close(name: str) -> str:
    return f"<|close|>{name}<|sep|>"


_AROUND = (_open("response"), _close("response"), _close("message"), "<|end_of_msg|>")


class KimiK3ReasoningParser(TagReasoningParser):
    """The prompt opens the thinking or the answer; the channel of the answer is unwrapped."""

    start = _open("think")
    end = _close("think")
    around = _AROUND
    single_tokens = False
    needs_special_tokens = True


class KimiK3ToolParser(ElementParser):
    """Each argument says its type; a call's ``index`` counts within the message, which the order of the calls does as well."""

    syntax = ElementSyntax(
        wrapper_begin=(_open("tools"),),
        wrapper_end=(_close("tools"),),
        around=_AROUND,
        call_begin="<|open|>call",
        call_end=_close("call"),
        argument_begin="<|open|>argument",
        argument_end=_close("argument"),
        call_header=re.compile(r'\s+tool="(?P<name>[^"]+)"(?:\s+index="[^"]*")?\s*'),
        argument_header=re.compile(r'\s+key="(?P<name>[^"]+)"(?:\s+type="(?P<form>[a-z]+)")?\s*'),
        tag_end="<|sep|>",
        bare=True,
        unclosed=True,
    )
    needs_special_tokens = True
    announcements = (*syntax.wrapper_begin, syntax.call_begin)

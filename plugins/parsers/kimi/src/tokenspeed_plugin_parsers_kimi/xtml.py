"""Kimi K3: reasoning, answer and tool calls as channels of one markup, XTML.

``<|open|>``, ``<|close|>`` and ``<|sep|>`` are special tokens; what stands between them is ordinary text, so a marker here is several tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parser import ParserDelta
from tokenspeed.interfaces.parsing import ElementParser, ElementSyntax, Scanner, TagReasoningParser, structural
from tokenspeed.interfaces.reasoning import ReasoningDelta

__all__ = ["KimiK3ReasoningParser", "KimiK3ToolParser"]

#: Names of arguments that a grammar may lead to: what the parser reads back.
_KEY = re.compile(r"[^\"<>\n]+")


def _open(name: str) -> str:
    return f"<|open|>{name}<|sep|>"


def _close(name: str) -> str:
    return f"<|close|>{name}<|sep|>"


_AROUND = (_open("response"), _close("response"), _close("message"), "<|end_of_msg|>")


def _drop_cut_marker(scan: Scanner) -> None:
    """What is held back at the end of the text and begins with a special token is a marker that a limit cut."""
    if scan.text.startswith(("<|open|>", "<|close|>"), scan.pos):
        scan.pos = len(scan.text)


class KimiK3ReasoningParser(TagReasoningParser):
    """The prompt opens the thinking or the answer; the channel of the answer is unwrapped."""

    start = _open("think")
    end = _close("think")
    around = _AROUND
    turn = re.compile(re.escape("<|open|>message"))
    single_tokens = False
    needs_special_tokens = True

    def answer_format(self, answer: Mapping[str, Any], token_ids: Mapping[str, int]) -> Mapping[str, Any]:
        """The answer's channel may be opened before it; behind it only the end follows."""
        channel = {"type": "optional", "content": structural.const(_open("response"))}
        return super().answer_format(structural.sequence(channel, answer), token_ids)

    def finish(self) -> ReasoningDelta:
        _drop_cut_marker(self._scan)
        return super().finish()


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

    def finish(self) -> ParserDelta:
        if self.outside:
            _drop_cut_marker(self.scan)
        return super().finish()

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        """Calls stand in a channel of their own. Where they are required, the one of the answer may be open, and is closed first."""
        index = {"type": "regex", "pattern": "[1-9][0-9]{0,2}"}
        (begin,), (end,) = cls.syntax.wrapper_begin, cls.syntax.wrapper_end
        tag = structural.calls(
            structural.functions(tools, names, keys=_KEY),
            lambda name, parameters: structural.tag(
                f'{cls.syntax.call_begin} tool="{name}" index="',
                structural.sequence(index, structural.const('"<|sep|>'), structural.schema(parameters, "kimi_k3_xml")),
                cls.syntax.call_end,
            ),
            required=required,
            parallel=parallel,
            separator="",
            triggers=(begin,),
            sections=((begin, end),),
            excludes=(cls.syntax.call_begin,),
        )
        if not required:
            return tag
        answer = structural.one_of(
            structural.const(_close("response")), structural.const(_open("response") + _close("response"))
        )
        return structural.structural_tag(structural.sequence({"type": "optional", "content": answer}, tag["format"]))

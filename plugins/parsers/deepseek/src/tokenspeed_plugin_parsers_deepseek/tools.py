"""DeepSeek tool calls: JSON between markers of full-width bars (U+FF5C) and low blocks (U+2581)."""

from __future__ import annotations

import re

from tokenspeed.interfaces.parsing import MarkedJsonParser, MarkedSyntax

__all__ = ["DeepSeekV3ToolParser", "DeepSeekV31ToolParser"]

_BEGIN = ("<｜tool▁call▁begin｜>",)
_END = ("<｜tool▁call▁end｜>",)
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>")
_SEPARATORS = ("<｜tool▁sep｜>",)


class _DeepSeekToolParser(MarkedJsonParser):
    syntax = MarkedSyntax(begin=_BEGIN, end=_END, around=_AROUND, separators=_SEPARATORS, header=re.compile(""))
    needs_special_tokens = True
    announcements = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")

    def identify(self, header: re.Match[str]) -> tuple[str, str | None]:
        return header["name"].strip(), None


class DeepSeekV3ToolParser(_DeepSeekToolParser):
    """V3 and R1: ``function<sep>NAME``, then the arguments in a Markdown fence."""

    syntax = MarkedSyntax(
        begin=_BEGIN,
        end=_END,
        around=_AROUND,
        separators=_SEPARATORS,
        header=re.compile(r"\s*\w*\s*<｜tool▁sep｜>(?P<name>[^\n`<]+)\s*(?:```(?:json)?\s*)?"),
    )


class DeepSeekV31ToolParser(_DeepSeekToolParser):
    """V3.1: ``NAME<sep>``, then the arguments bare."""

    syntax = MarkedSyntax(
        begin=_BEGIN,
        end=_END,
        around=_AROUND,
        separators=_SEPARATORS,
        header=re.compile(r"\s*(?P<name>[^\n<]+)<｜tool▁sep｜>\s*"),
    )

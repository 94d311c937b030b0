"""DeepSeek tool calls: JSON between markers of full-width bars (U+FF5C) and low blocks (U+2581)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parsing import MarkedJsonParser, MarkedSyntax, structural

__all__ = ["DeepSeekV3ToolParser", "DeepSeekV31ToolParser"]

_BEGIN = ("<｜tool▁call▁begin｜>",)
_END = ("<｜tool▁call▁end｜>",)
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>")
_SEPARATORS = ("<｜tool▁sep｜>",)


class _DeepSeekToolParser(MarkedJsonParser):
    syntax = MarkedSyntax(begin=_BEGIN, end=_END, around=_AROUND, separators=_SEPARATORS, header=re.compile(""))
    needs_special_tokens = True
    announcements = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")

    #: What stands between the markers of a call and its name, and around its arguments.
    before_name: str
    before_arguments: str
    behind_arguments: str

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        return structural.calls(
            structural.functions(tools, names),
            lambda name, parameters: structural.tag(
                f"{_BEGIN[0]}{cls.before_name}{name}{cls.before_arguments}",
                structural.schema(parameters),
                f"{cls.behind_arguments}{_END[0]}",
            ),
            required=required,
            parallel=parallel,
            separator="\n",
            triggers=(_AROUND[0],),
            sections=(_AROUND[:2],),
            excludes=_BEGIN,
        )

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
    before_name, before_arguments, behind_arguments = f"function{_SEPARATORS[0]}", "\n```json\n", "\n```"


class DeepSeekV31ToolParser(_DeepSeekToolParser):
    """V3.1: ``NAME<sep>``, then the arguments bare."""

    syntax = MarkedSyntax(
        begin=_BEGIN,
        end=_END,
        around=_AROUND,
        separators=_SEPARATORS,
        header=re.compile(r"\s*(?P<name>[^\n<]+)<｜tool▁sep｜>\s*"),
    )
    before_name, before_arguments, behind_arguments = "", _SEPARATORS[0], ""

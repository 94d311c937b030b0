"""Calls in hermes form: ``<tool_call>`` a JSON object with ``name`` and ``arguments`` ``</tool_call>``, one pair of tags per call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.parsing import JsonCall, Progress, StateMachine, structural
from tokenspeed.interfaces.parsing.scanner import Markers

__all__ = ["HermesToolParser"]

_BEGIN, _END = "<tool_call>", "</tool_call>"
_MARKERS = Markers((_BEGIN, _END))
_SPACE = re.compile(r"\s*")
_BEHIND = re.compile(r"[\s}]*")  # a brace too many is a common slip


class HermesToolParser(StateMachine):
    """States: text, before a call, call, behind a call.

    A call is read by JSON's own rules, so that tags and braces inside its strings are data, and its arguments are told as the model writes them. What is no
    call after all becomes content without its tags; what was told of it by then stays unfinished. A missing closing tag ends with the object, and one
    pair of tags may hold several objects. The name is passed on as it is, whether the request declared it or not.
    """

    announcements = (_BEGIN,)

    def __init__(self, ctx: ParserContext) -> None:
        super().__init__(ctx)
        self._call = JsonCall()
        self._raw: list[str] = []  # text of the call so far, should it become content
        self._told = False

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        return structural.calls(
            structural.functions(tools, names),
            lambda name, parameters: structural.tag(
                f'{_BEGIN}\n{{"name": "{name}", "arguments": ', structural.schema(parameters), f"}}\n{_END}"
            ),
            required=required,
            parallel=parallel,
            separator="\n",
            triggers=(_BEGIN,),
        )

    def on_text(self) -> bool:
        text, marker = self.scan.until(_MARKERS)
        self.out.text(text)
        if not marker:
            return False
        self.out.markup()
        if marker == _BEGIN:
            self.state = self.on_before
        return True

    def on_before(self) -> bool:
        self.scan.match(_SPACE)
        if self.scan.empty:
            return False
        self._call, self._raw, self._told = JsonCall(), [], False
        self.state = self.on_call
        return True

    def on_call(self) -> bool:
        begin = self.scan.pos
        arguments, self.scan.pos = self._call.feed(self.scan.text, begin)
        self._raw.append(self.scan.text[begin : self.scan.pos])
        if self._call.begun and not self._told:
            self._told = True
            self.out.begin(self._call.name or "", self._call.id)
        self.out.arguments(arguments)
        if self._call.progress is Progress.OPEN:
            return False
        if self._call.progress is Progress.DONE:
            self.state = self.on_behind
        else:
            self.out.text(_MARKERS.strip("".join(self._raw)))
            self.state = self.on_text
        self._raw = []
        return True

    def on_behind(self) -> bool:
        self.scan.match(_BEHIND)
        if self.scan.empty:
            return False
        self.out.markup()
        self.state = self.on_before if self.scan.peek() == "{" else self.on_text
        return True

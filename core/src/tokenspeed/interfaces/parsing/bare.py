"""Calls as JSON objects in plain text, with nothing to announce them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.parsing import structural
from tokenspeed.interfaces.parsing.json_call import JsonCall
from tokenspeed.interfaces.parsing.json_stream import Progress
from tokenspeed.interfaces.parsing.machine import StateMachine

__all__ = ["BareJsonParser", "partial"]

#: Longest beginning of an object that may turn out to be no call: so much text is held back at most.
_MAX_HEAD = 1024
_SPACE = r"[ \t\r\n]{0,16}+"


def partial(text: str, then: str = "") -> str:
    """A pattern that matches ``text`` followed by the pattern ``then``, or as much of it as stands at the end of the searched text."""
    pattern = then
    for char in reversed(text):
        pattern = rf"{re.escape(char)}(?:\Z|{pattern})" if pattern else re.escape(char)
    return pattern


_KEYS = ("name", "id", "type")
_WHOLE_HEAD = re.compile(rf'(?:\[{_SPACE})?\{{{_SPACE}"(?:{"|".join(_KEYS)})"')


#: What other objects that would be read as calls hold: a grammar keeps it out of text, since only ``{"name"`` leads into a call there.
_OTHER_HEADS = (*(f'{space}"{key}"' for key in _KEYS for space in " \t\r\n"), '{"id"', '{"type"')


def _head_pattern(around: tuple[str, ...]) -> re.Pattern[str]:
    keys = "|".join(partial(f'"{key}"') for key in _KEYS)
    head = rf"{_SPACE}(?:\Z|{keys})"
    return re.compile("|".join([rf"\{{(?={head})", rf"\[(?={_SPACE}(?:\Z|\{{{head}))", *map(partial, around)]))


class BareJsonParser(StateMachine):
    """States: text, call, separators.

    An object is a call if it begins with a name (an id or a type may precede) and arguments follow; any other comes back as the text it is, held back
    no longer than that takes. Calls may stand in an array, and runs of ``;`` and white space separate them. A call that breaks in its arguments
    becomes content.
    """

    #: Markers that are no content.
    around: tuple[str, ...] = ()

    #: The key of a call's arguments, as models of the family write it.
    arguments_key = "arguments"

    _heads: re.Pattern[str]
    _array_open = re.compile(r"\[[ \t\r\n]*")
    _separators = re.compile(r"[\s;]*")
    _array_separators = re.compile(r"[\s;,]*")

    def __init_subclass__(cls) -> None:
        cls._heads = _head_pattern(cls.around)

    def __init__(self, ctx: ParserContext) -> None:
        super().__init__(ctx)
        self._call = JsonCall(strict=True)
        self._told = False  # the call was begun in the output
        self._raw: list[str] = []  # text of the call so far, should it be none
        self._raw_size = 0
        self._in_array = False

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        return structural.calls(
            structural.functions(tools, names),
            lambda name, parameters: structural.tag(
                f'{{"name": "{name}", "{cls.arguments_key}": ', structural.schema(parameters), "}"
            ),
            required=required,
            parallel=parallel,
            separator="\n",
            triggers=('{"name"',),
            excludes=_OTHER_HEADS,
        )

    def on_text(self) -> bool:
        scan = self.scan
        match = self._heads.search(scan.text, scan.pos)
        begin = match.start() if match else len(scan.text)
        before = scan.text[scan.pos : begin]
        self.out.text(before)
        self._in_array = self._in_array and not before.strip()
        scan.pos = begin
        if match is None:
            return False
        if match.group() in self.around:
            self.out.markup()
            scan.pos = match.end()
            return True
        if not _WHOLE_HEAD.match(scan.text, begin):  # the beginning of a marker or of a call
            return self._undecided()
        opening = scan.match(self._array_open)
        self._in_array = self._in_array or bool(opening)
        self._call, self._told = JsonCall(strict=True), False
        self._raw, self._raw_size = [opening], len(opening)
        self.state = self.on_call
        return True

    def _undecided(self) -> bool:
        """What is left may become a marker or a call, unless the text is at its end."""
        if self.scan.closed:
            self.out.text(self.scan.text[self.scan.pos :])
            self.scan.pos = len(self.scan.text)
        return False

    def on_call(self) -> bool:
        scan, call = self.scan, self._call
        if scan.empty:
            return False
        begin = scan.pos
        if call.begun:
            told, scan.pos = call.feed(scan.text, begin)
        else:
            told, size = call.feed(scan.text[begin : begin + _MAX_HEAD - self._raw_size])
            scan.pos += size
            self._raw_size += size
        self._raw.append(scan.text[begin : scan.pos])
        if call.begun and not self._told and call.name is not None:
            self.out.begin(call.name, call.id)
            self._told = True
        self.out.arguments(told)
        if call.progress is Progress.DONE:
            self._raw = []
            self.state = self.on_separators
        elif call.progress is Progress.FAILED or (not call.begun and self._raw_size >= _MAX_HEAD):
            self._to_text()
        return True

    def _to_text(self) -> None:
        self.out.text("".join(self._raw))
        self._raw, self._in_array = [], False
        self.state = self.on_text

    def on_separators(self) -> bool:
        self.scan.match(self._array_separators if self._in_array else self._separators)
        if self.scan.empty:
            return False
        if self._in_array and self.scan.peek() == "]":
            self.scan.pos += 1
            self._in_array = False
            return True
        self.out.markup()
        self.state = self.on_text
        return True

    def on_end(self) -> None:
        if self.state == self.on_call and not self._told:
            self._to_text()

"""Calls between markers: a header that names the function, then its arguments as one JSON object."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.parsing.json_stream import JsonStream, Progress
from tokenspeed.interfaces.parsing.machine import StateMachine
from tokenspeed.interfaces.parsing.scanner import Markers

__all__ = ["MarkedJsonParser", "MarkedSyntax"]

_MAX_HEADER = 1024
_CLOSERS = re.compile(r"[\s}`]*")


@dataclass(frozen=True, kw_only=True)
class MarkedSyntax:
    """The table of one family.

    Attributes:
        begin: markers that begin a call.
        end: markers that end one.
        around: further markers that are no content: sections around calls, ends of turns, separators inside headers.
        header: must match all text between ``begin`` and the arguments.
        closers: characters that may stand between the arguments and ``end``; a stray brace is a common slip.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    around: tuple[str, ...]
    header: re.Pattern[str]
    separators: tuple[str, ...] = ()
    closers: re.Pattern[str] = _CLOSERS


class MarkedJsonParser(StateMachine):
    """States: text, header, arguments, behind the arguments.

    The arguments are followed by JSON's own rules, so markers inside their strings are data. A call whose header or arguments are malformed becomes
    content, without its markers; what was told of it by then stays unfinished.
    """

    syntax: MarkedSyntax
    _markers: Markers
    _header_ends: Markers

    def __init_subclass__(cls) -> None:
        syntax = cls.syntax
        cls._markers = Markers((*syntax.begin, *syntax.end, *syntax.around, *syntax.separators))
        cls._header_ends = Markers((*cls._markers.texts, "{"))

    def __init__(self, ctx: ParserContext) -> None:
        super().__init__(ctx)
        self._raw: list[str] = []  # text of the call so far, should it become content
        self._raw_size = 0
        self._json = JsonStream()

    @abstractmethod
    def identify(self, header: re.Match[str]) -> tuple[str, str | None]:
        """Name and id of the call; an empty name makes it malformed."""

    def on_text(self) -> bool:
        text, marker = self.scan.until(self._markers)
        self.out.text(text)
        if not marker:
            return False
        self.out.markup()
        if marker in self.syntax.begin:
            self._enter_header()
        return True

    def _enter_header(self) -> None:
        self._raw, self._raw_size = [], 0
        self.state = self.on_header

    def on_header(self) -> bool:
        text, marker = self.scan.until(self._header_ends)
        separator = marker in self.syntax.separators
        spare = _MAX_HEADER - self._raw_size - len(text) - (len(marker) if separator else 0)
        if spare < 0:
            # Cut at the limit itself, wherever the text was cut when it arrived.
            self.scan.pos -= len(marker) + max(0, len(text) - (_MAX_HEADER - self._raw_size))
            self._raw.append(text[: _MAX_HEADER - self._raw_size])
            self._header_to_text()
            return True
        self._raw.append(text + marker if separator else text)
        self._raw_size = _MAX_HEADER - spare
        if separator or not marker:
            return separator
        self._end_header(marker)
        return True

    def _end_header(self, marker: str) -> None:
        match = self.syntax.header.fullmatch("".join(self._raw))
        name, call_id = self.identify(match) if match else ("", None)
        if not name:
            self.scan.pos -= len(marker)
            self._header_to_text()
            return
        self.out.begin(name, call_id)
        if marker == "{":
            self.scan.pos -= 1
            self._json = JsonStream()
            self.state = self.on_arguments
            return
        self.out.arguments("{}")  # none at all
        self.out.markup()
        self.state = self.on_text
        if marker in self.syntax.begin:
            self._enter_header()

    def on_arguments(self) -> bool:
        begin = self.scan.pos
        copied, self.scan.pos = self._json.feed(self.scan.text, begin)
        self._raw.append(self.scan.text[begin : self.scan.pos])
        self.out.arguments(copied)
        if self._json.progress is Progress.OPEN:
            return False
        if self._json.progress is Progress.FAILED:
            self._to_content()
        else:
            self._raw = []
            self.state = self.on_closers
        return True

    def on_closers(self) -> bool:
        self.scan.match(self.syntax.closers)
        if self.scan.empty:
            return False
        self.out.markup()
        self.state = self.on_text
        return True

    def _header_to_text(self) -> None:
        """The header is malformed: it is read as the text that it would be outside a call."""
        text, at = "".join(self._raw), 0
        self._raw = []
        while True:
            begin, end = self._markers.find(text, at, closed=True)
            self.out.text(text[at:begin])
            if begin == end:
                break
            self.out.markup()
            at = end
        self.state = self.on_text

    def _to_content(self) -> None:
        """The arguments are malformed: the call's text is content, all markup of the family taken out."""
        text = "".join(self._raw)
        self._raw = []
        self.out.text(self._markers.strip(text))
        self.state = self.on_text

"""Calls written as XML-like elements: a call element that holds one element per argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.parsing.arguments import ArgumentWriter
from tokenspeed.interfaces.parsing.machine import StateMachine
from tokenspeed.interfaces.parsing.scanner import Markers
from tokenspeed.interfaces.parsing.schema import ANY, STRING, ToolSchemas

__all__ = ["ElementParser", "ElementSyntax"]

_MAX_HEADER = 1024


@dataclass(frozen=True, kw_only=True)
class ElementSyntax:
    """The table of one family.

    Attributes:
        wrapper_begin: markers that begin a group of calls.
        wrapper_end: markers that end one.
        call_begin: what a call's opening tag begins with, up to where its header starts; the header runs to ``tag_end``.
        call_end: closing tag of a call.
        argument_begin: what an argument's opening tag begins with.
        argument_end: closing tag of an argument.
        call_header: must match the header of a call; its group ``name`` is the function.
        argument_header: must match the header of an argument: group ``name`` and, where the format itself says what the value is, ``form``, which is
            ``true`` or ``string`` for text and anything else for JSON.
        tag_end: end of an opening tag.
        around: further markers that are no content.
        bare: calls may stand outside a wrapper.
        trim: one line break at each end of a value belongs to the markup.
        unclosed: an argument whose closing tag is missing ends where the next one begins.
    """

    wrapper_begin: tuple[str, ...]
    wrapper_end: tuple[str, ...]
    call_begin: str
    call_end: str
    argument_begin: str
    argument_end: str
    call_header: re.Pattern[str]
    argument_header: re.Pattern[str]
    tag_end: str = ">"
    around: tuple[str, ...] = ()
    bare: bool = False
    trim: bool = False
    unclosed: bool = False


class ElementParser(StateMachine):
    """States: text, wrapper, call header, call, argument header, argument value, broken argument.

    A value ends at its closing tag, at the closing tag of the call, or (``unclosed``) at the next argument; where calls are constrained, at its closing
    tag alone. An argument whose header is malformed is
    dropped up to there. A call whose header is malformed becomes content. A call is complete at its closing tag, or where the next call or the end of
    the wrapper shows that the tag was forgotten.
    """

    syntax: ElementSyntax
    _text_markers: Markers
    _markers: Markers
    _value_ends: Markers
    _exact_ends: Markers
    _broken_ends: Markers
    _header_ends: Markers

    def __init_subclass__(cls) -> None:
        syntax = cls.syntax
        wrappers = (*syntax.wrapper_begin, *syntax.wrapper_end, *syntax.around)
        tags = (syntax.call_begin, syntax.call_end, syntax.argument_begin, syntax.argument_end)
        cls._markers = Markers((*wrappers, *tags))
        cls._text_markers = Markers((*wrappers, *tags)) if syntax.bare else Markers(wrappers)
        cls._header_ends = Markers((syntax.tag_end, "<", "\n"))
        ends = (syntax.argument_end, syntax.call_end)
        cls._broken_ends = Markers((*ends, syntax.argument_begin))
        cls._exact_ends = Markers((syntax.argument_end,))
        cls._value_ends = cls._broken_ends if syntax.unclosed else Markers(ends)

    def __init__(self, ctx: ParserContext) -> None:
        super().__init__(ctx)
        self.schemas = ToolSchemas(ctx.tools)
        self._header: list[str] = []
        self._header_size = 0
        self._outer = self.on_text  # the state to return to behind a call
        self._writer = ArgumentWriter(self.out, self.schemas, "", trim=False)  # of the open call

    # -- outside calls

    @property
    def outside(self) -> bool:
        return self.state in (self.on_text, self.on_wrapper)

    def on_text(self) -> bool:
        return self._between(self._text_markers)

    def on_wrapper(self) -> bool:
        """Inside a wrapper, outside calls."""
        return self._between(self._markers)

    def _between(self, markers: Markers) -> bool:
        text, marker = self.scan.until(markers)
        self.out.text(text)
        if not marker:
            return False
        self.out.markup()
        self._outside(marker)
        return True

    def _outside(self, marker: str) -> None:
        if marker == self.syntax.call_begin:
            self._enter_header(self.on_call_header)
        elif marker in self.syntax.wrapper_begin:
            self.state = self._outer = self.on_wrapper
        elif marker in self.syntax.wrapper_end or marker in self.syntax.around:
            self.state = self._outer = self.on_text

    # -- headers: everything up to the tag's end, on one line

    def _enter_header(self, state: Callable[[], bool]) -> None:
        self._header, self._header_size = [], 0
        self.state = state

    def _read_header(self) -> str | None:
        """``None`` while it goes on; then what ended it, or nothing if it is malformed."""
        text, end = self.scan.until(self._header_ends)
        spare = _MAX_HEADER - self._header_size - len(text)
        if spare < 0:  # cut at the limit itself, wherever the text was cut when it arrived
            self.scan.pos += spare - len(end)
            self._header.append(text[:spare])
            return ""
        self._header.append(text)
        self._header_size += len(text)
        if end in ("<", "\n"):
            self.scan.pos -= 1
            return ""
        return end or None

    def on_call_header(self) -> bool:
        end = self._read_header()
        if end is None:
            return False
        match = self.syntax.call_header.fullmatch("".join(self._header)) if end else None
        if match is None or not match["name"].isprintable():
            self.out.text("".join(self._header) + (end if end == ">" else ""))
            self.state = self._outer
            return True
        self.out.begin(match["name"])
        self._writer = ArgumentWriter(
            self.out, self.schemas, match["name"], trim=self.syntax.trim, held=match["name"] in self.ctx.held
        )
        self.state = self.on_call
        return True

    def on_argument_header(self) -> bool:
        end = self._read_header()
        if end is None:
            return False
        match = self.syntax.argument_header.fullmatch("".join(self._header)) if end else None
        if match is None:
            self.state = self.on_broken_argument
            return True
        stated = match.groupdict().get("form")
        text = stated in ("true", "string")
        types = None if stated is None else STRING if text else ANY
        self._writer.begin(match["name"], types, json=self.ctx.constrained and types is ANY)
        self.state = self.on_value
        return True

    # -- inside a call

    def on_call(self) -> bool:
        """Between arguments; text here is noise."""
        _, marker = self.scan.until(self._markers)
        if marker:
            self._inside(marker)
        return bool(marker)

    def on_value(self) -> bool:
        marker = self._writer.read(self.scan, self._exact_ends if self.ctx.constrained else self._value_ends)
        if not marker:
            return False
        self._writer.end()
        self._inside(marker)
        return True

    def on_broken_argument(self) -> bool:
        """Behind a malformed argument header: dropped up to where its value would end."""
        _, marker = self.scan.until(self._broken_ends)
        if marker:
            self._inside(marker)
        return bool(marker)

    def _inside(self, marker: str) -> None:
        syntax = self.syntax
        if marker == syntax.argument_begin:
            self._enter_header(self.on_argument_header)
        elif marker == syntax.argument_end:
            self.state = self.on_call
        else:
            self._writer.close()
            self.out.markup()
            self.state = self._outer
            if marker != syntax.call_end:
                self._outside(marker)

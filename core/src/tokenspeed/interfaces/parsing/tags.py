"""Reasoning between a start and an end tag."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parsing import structural
from tokenspeed.interfaces.parsing.scanner import Markers, Scanner, last_marker
from tokenspeed.interfaces.reasoning import ReasoningContext, ReasoningDelta, ReasoningParser

__all__ = ["Segments", "TagReasoningParser"]

#: What the markers of turns look like in most families.
_TURN = re.compile(r"<[|｜][^<>\n]{1,64}[|｜]>|\[/INST\]|\]~b\]|\[e~\[")

#: Line breaks that models like to write behind the end tag; they are no part of the answer.
_BREAKS = {"type": "regex", "pattern": "\\n{0,2}"}


class Segments:
    """Collects pieces of reasoning and content in order, neighbours of one kind joined."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[tuple[bool, list[str]]] = []

    def add(self, inside: bool, text: str) -> None:
        """A piece of text."""
        if not text:
            return
        if not self._pieces or self._pieces[-1][0] is not inside:
            self._pieces.append((inside, []))
        self._pieces[-1][1].append(text)

    def take(self) -> ReasoningDelta:
        """What was collected since the last call."""
        pieces, self._pieces = self._pieces, []
        return ReasoningDelta(tuple((inside, "".join(texts)) for inside, texts in pieces))


class TagReasoningParser(ReasoningParser):
    """Reasoning stands between ``start`` and ``end``.

    Whether the text begins inside is read from the prompt: its last tag is ``start``, and no turn has begun behind it. No end tag: all that follows is
    reasoning. No start tag, neither in the prompt nor in the text: all is content. There is one block (one that the prompt closes counts), more only
    where tokens tell which tags are real. A tag that changes nothing is dropped. One line break on the inner side of each tag, and all behind the end
    tag, are markup.
    """

    start: str = "<think>"
    end: str = "</think>"
    single_tokens = True

    #: Further markup of the format, which is neither reasoning nor content.
    around: tuple[str, ...] = ()

    #: What begins a turn of the prompt: a start tag with one behind it stands in the conversation, and is not the beginning of the reply.
    turn: re.Pattern[str] = _TURN

    _tags: Markers

    def __init_subclass__(cls) -> None:
        cls.markers = (cls.start, cls.end)
        cls.end_marker = cls.end
        cls._tags = Markers((*cls.markers, *cls.around))

    def __init__(self, ctx: ReasoningContext) -> None:
        super().__init__(ctx)
        marker, behind = last_marker(ctx.prompt_tail, self.markers)
        rest = ctx.prompt_tail[behind:]
        here = self.turn.search(rest) is None
        self._inside = marker == self.start and here
        self._closed = marker == self.end and here  # the block is behind us
        self._drop = 1 if self._inside and not rest else 0  # line breaks to drop: none, one, all (-1)
        self._line_break = False  # one is held back: an end tag may follow
        self._scan = Scanner()
        self._segments = Segments()

    def answer_format(self, answer: Mapping[str, Any], token_ids: Mapping[str, int]) -> Mapping[str, Any]:
        """A block that is open goes on up to its end; one that was not begun may be; behind one that the prompt closes there is the answer alone."""
        if self._closed:
            return answer
        start, end = (structural.token(tag) if tag in token_ids else tag for tag in self.markers)
        thought = structural.text(self.end)
        if self._inside:
            return structural.sequence(structural.tag("", thought, end), _BREAKS, answer)
        block = structural.sequence(structural.tag(start, thought, end), _BREAKS)
        return structural.sequence({"type": "optional", "content": block}, answer)

    @property
    def inside(self) -> bool:
        return self._inside

    def feed(self, text: str, marker_spans: Sequence[tuple[int, int]] | None = None) -> ReasoningDelta:
        if marker_spans is None or not self.single_tokens:
            self._scan.append(text)
            self._read()
            return self._segments.take()
        done = 0
        for begin, end in marker_spans:
            self._text(text[done:begin])
            self._closed = False
            self._tag(text[begin:end])
            done = end
        self._text(text[done:])
        return self._segments.take()

    def finish(self) -> ReasoningDelta:
        self._scan.closed = True
        self._read()
        self._flush_line_break()
        return self._segments.take()

    def end_reasoning(self) -> ReasoningDelta:
        held, self._scan = self._scan, Scanner()
        self._text(held.text[held.pos :])
        self._flush_line_break()
        self._inside, self._closed, self._drop = False, True, 0
        return self._segments.take()

    def _read(self) -> None:
        while True:
            text, tag = self._scan.until(self._tags)
            self._text(text)
            if not tag:
                return
            self._tag(tag)

    def _text(self, text: str) -> None:
        if self._drop and text:
            if self._drop < 0:
                text = text.lstrip("\n")
                self._drop = 0 if text else -1
            else:
                text = text.removeprefix("\n")
                self._drop = 0
        if not text:
            return
        self._flush_line_break()
        if self._inside and text.endswith("\n"):
            self._line_break = True
            text = text[:-1]
        self._segments.add(self._inside, text)

    def _flush_line_break(self) -> None:
        if self._line_break:
            self._segments.add(self._inside, "\n")
            self._line_break = False

    def _tag(self, tag: str) -> None:
        if tag == self.end:
            self._line_break = False
            if self._inside:
                self._inside, self._closed, self._drop = False, True, -1
        elif tag == self.start and not self._closed:
            self._flush_line_break()
            self._inside, self._drop = True, 1

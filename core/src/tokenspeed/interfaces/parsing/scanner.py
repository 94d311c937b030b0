"""Text in, cut anywhere; markers out, whole. What may still become a marker is held back, nothing else is."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["Markers", "Scanner", "last_marker"]


class Markers:
    """A set of marker texts, prepared for searching.

    Where two markers begin at one place, the longer is meant.
    """

    __slots__ = ("_firsts", "_inner", "_pattern", "_prefixes", "longest", "texts")

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted(set(texts), key=len, reverse=True))
        if not self.texts or "" in self.texts:
            raise ValueError("a marker set needs at least one marker, and no marker is empty")
        self.longest = len(self.texts[0])
        self._pattern = re.compile("|".join(map(re.escape, self.texts)))
        self._prefixes = frozenset(text[:size] for text in self.texts for size in range(1, len(text)))
        self._firsts = frozenset(text[0] for text in self.texts)
        self._inner = any(a in b[1:] for a in self.texts for b in self.texts)

    def find(self, text: str, begin: int, closed: bool) -> tuple[int, int]:
        """The first marker at or after ``begin`` as ``(begin, end)``.

        ``end == begin`` says that no whole marker is known yet and that everything before ``begin`` is none; if ``closed``, no more text follows.
        """
        match = self._pattern.search(text, begin)
        if closed:
            return match.span() if match else (len(text), len(text))
        if match is None:
            held = self._held(text, begin, len(text))
            return held, held
        first = match.start()
        if self._inner and (held := self._held(text, begin, first)) < first:
            return held, held
        if len(text) - first < self.longest and text[first:] in self._prefixes:
            return first, first
        return match.span()

    def strip(self, text: str) -> str:
        """``text`` without the markers in it."""
        return self._pattern.sub("", text)

    def _held(self, text: str, begin: int, end: int) -> int:
        """Where a marker may have begun that the end of ``text`` cuts off; ``end`` if nowhere before it."""
        for at in range(max(begin, len(text) - self.longest + 1), end):
            if text[at] in self._firsts and text[at:] in self._prefixes:
                return at
        return end


class Scanner:
    """The text that no state has consumed yet.

    Attributes:
        text: buffer; ``text[pos:]`` is what is left. States keep it short: they consume all that cannot be part of a marker.
        pos: offset of the first character that is left.
        closed: no more text will come.
    """

    __slots__ = ("closed", "pos", "text")

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.closed = False

    def append(self, text: str) -> None:
        """Add what was generated since the last call."""
        self.text = self.text[self.pos :] + text if self.pos < len(self.text) else text
        self.pos = 0

    @property
    def empty(self) -> bool:
        """Whether everything has been consumed."""
        return self.pos >= len(self.text)

    def peek(self) -> str:
        """The next character, or nothing."""
        return self.text[self.pos : self.pos + 1]

    def until(self, markers: Markers) -> tuple[str, str]:
        """Consume the text before the next marker, and the marker: ``(text, marker)``; the marker is empty where none is known yet."""
        begin, end = markers.find(self.text, self.pos, self.closed)
        before = self.text[self.pos : begin]
        self.pos = end
        return before, self.text[begin:end]

    def find(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Consume what ``pattern`` matches here, if it does."""
        found = pattern.match(self.text, self.pos)
        if found is not None:
            self.pos = found.end()
        return found

    def match(self, pattern: re.Pattern[str]) -> str:
        """Consume what ``pattern`` matches here, for example a run of white space: its text, or nothing."""
        found = self.find(pattern)
        return found[0] if found else ""


def last_marker(text: str, markers: Iterable[str]) -> tuple[str, int]:
    """The marker that stands last in ``text`` and the offset behind it; ``("", 0)`` if there is none."""
    best, behind = "", 0
    for marker in markers:
        at = text.rfind(marker)
        if at >= 0 and at + len(marker) > behind:
            best, behind = marker, at + len(marker)
    return best, behind

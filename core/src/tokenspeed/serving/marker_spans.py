"""Where in the text that a client is told the marker tokens stand."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["MarkerSpans"]


class MarkerSpans:
    """Follows marks from the generated text to the pieces of it that are released, perhaps later (stop strings hold text back).

    A mark is never cut: a piece ends before a mark that it would hold only a part of.
    """

    __slots__ = ("_held", "_marks", "_told")

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int]] = deque()
        self._told = 0  # characters released so far
        self._held = ""

    def mark(self, begin: int, end: int) -> None:
        """A marker token stands at ``[begin, end)`` of the generated text; marks come in order, each before its text is released."""
        self._marks.append((begin, end))

    def release(self, text: str, *, closed: bool) -> tuple[str, Sequence[tuple[int, int]]]:
        """What can be told now that ``text`` has become known, with the places of the marks in it; ``closed``: nothing follows."""
        text = self._held + text
        told, end = self._told, self._told + len(text)
        spans = []
        while self._marks and self._marks[0][1] <= end:
            begin, behind = self._marks.popleft()
            spans.append((begin - told, behind - told))
        if self._marks and self._marks[0][0] < end and not closed:
            end = self._marks[0][0]
        self._held = text[end - told :]
        self._told = end
        return text[: end - told], spans

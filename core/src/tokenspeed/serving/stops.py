"""Stop strings across token borders.

Each stop string runs as a Knuth-Morris-Pratt automaton over the text, so the work per character does not depend on how often a match is begun and given up. The
text that may still become a stop string, the longest partial match, is held back.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Finds the first place where any stop string is complete.

    Args:
        stops: non-empty strings.
        include: the matched string stays in the text.
    """

    __slots__ = ("_borders", "_firsts", "_held", "_include", "_states", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._states = [0] * len(stops)
        self._held = ""
        self._include = include
        #: the stop string that ended the text, or ``None``.
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that can be told; after a match ``matched`` is set and everything further is dropped."""
        if self.matched is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        buffer = self._held + text
        states, stops = self._states, self._stops
        for at in range(len(self._held), len(buffer)):
            char = buffer[at]
            longest = 0
            for i, stop in enumerate(stops):
                state, borders = states[i], self._borders[i]
                while state and stop[state] != char:
                    state = borders[state - 1]
                if stop[state] == char:
                    state += 1
                    if state == len(stop):
                        longest = max(longest, state)
                        state = borders[state - 1]
                states[i] = state
            if longest:
                self.matched = buffer[at + 1 - longest : at + 1]
                self._held = ""
                return buffer[: at + 1] if self._include else buffer[: at + 1 - longest]
        keep = max(states)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """The text ended without a match: what was held back is plain text."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held


def _borders(word: str) -> list[int]:
    """Length of the longest proper prefix of ``word[: i + 1]`` that is also its suffix, for every i."""
    table = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = table[length - 1]
        if word[i] == word[length]:
            length += 1
        table[i] = length
    return table

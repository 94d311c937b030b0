"""What sessions keep, by plain rules: which there are, which pages each has, and who gives way. One tenant: no salts, no adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Sessions"]

Page = tuple[int, ...]  # the tokens up to its end: a page is its whole prefix


class Kept(NamedTuple):
    until: int
    pages: frozenset[Page]


class Sessions:
    """Sessions by number."""

    def __init__(self, page: int, bound: int) -> None:
        self.page = page
        self.bound = bound  # pages that all together keep
        self.kept: dict[int, Kept] = {}

    @property
    def pages(self) -> set[Page]:
        return {page for kept in self.kept.values() for page in kept.pages}

    def expire(self, now: int) -> None:
        self.kept = {number: kept for number, kept in self.kept.items() if kept.until > now}

    def end(self, session: int, retain_us: int, tokens: Sequence[int], pages: int, now: int) -> None:
        """A request of ``session`` has ended well and leaves ``pages`` whole pages in the cache."""
        if session < 0:
            return
        self.kept.pop(session, None)
        if retain_us == 0 or not 0 < pages <= self.bound:
            return
        names = frozenset(tuple(tokens[: self.page * (i + 1)]) for i in range(pages))
        self.kept[session] = Kept(now + retain_us, names)
        while len(self.pages) > self.bound:
            in_order = sorted((kept.until, number) for number, kept in self.kept.items())
            first, second = in_order[0][1], in_order[1][1]
            del self.kept[second if first == session else first]

"""Where one request stands in its grammar: before it (reasoning), in it, or behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenspeed.interfaces.grammar import CompiledGrammar

__all__ = ["ROLLBACK_LIMIT", "GrammarState"]

#: Tokens that can be taken back: what a matcher must be able to undo.
ROLLBACK_LIMIT = 64

Mask = npt.NDArray[np.int32]


class _Before(NamedTuple):
    """What one token changed."""

    progress: int
    ended: bool
    fault: str
    matched: bool


class GrammarState:
    """Follows the tokens of one request.

    Args:
        compiled: its grammar.
        reasoning_end: ids after which the grammar begins; empty is from the first token on. The ids are looked for among generated tokens, so it does
            not matter how the prompt ended; overlapping beginnings of the marker are followed as in Knuth, Morris and Pratt's search (1977).
        end_ids: ids that end the request; those that are no stop tokens of the model are allowed where the grammar may end.
        stop_ids: the model's stop tokens, which the grammar itself allows or not.
        ignored_ids: stop tokens that are masked (``ignore_eos``), unless the grammar allows nothing else.
        min_tokens: no end is allowed before this many, unless the grammar allows nothing else.
    """

    __slots__ = (
        "_begun_at", "_end_ids", "_extra", "_failure", "_history", "_ignored", "_marker", "_matcher", "_min_tokens", "_progress", "_stop_ids", "ended", "fault",
        "length",
    )  # fmt: skip

    def __init__(
        self,
        compiled: CompiledGrammar,
        *,
        reasoning_end: Sequence[int] = (),
        end_ids: Iterable[int] = (),
        stop_ids: Iterable[int] = (),
        ignored_ids: Iterable[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._matcher = compiled.matcher()
        self._marker = tuple(reasoning_end)
        self._failure = _failure_function(self._marker)
        self._end_ids = frozenset(end_ids)
        self._stop_ids = np.array(sorted(set(stop_ids)), dtype=np.int64)
        self._extra = np.array(sorted(self._end_ids.difference(self._stop_ids.tolist())), dtype=np.int64)
        self._ignored = np.array(sorted(set(ignored_ids)), dtype=np.int64)
        self._min_tokens = min_tokens
        self._progress = 0
        self._begun_at = len(self._marker)
        self._history: deque[_Before] = deque(maxlen=ROLLBACK_LIMIT)
        #: tokens taken
        self.length = 0
        #: an end token was taken
        self.ended = False
        #: why nothing can follow, or empty
        self.fault = ""

    @property
    def begun(self) -> bool:
        """The grammar constrains the next token."""
        return self._progress == self._begun_at

    def take(self, token: int) -> None:
        """The next generated token. What comes after the end is ignored; one that the grammar does not allow is a ``fault``."""
        matched, before = False, (self._progress, self.ended, self.fault)
        if not self.ended and not self.fault:
            if token in self._end_ids:
                self.ended = True
            elif not self.begun:
                self._progress = self._follow(token)
            elif self._matcher.accept(token):
                matched = True
            else:
                self.fault = f"the grammar does not allow token {token}, which was generated"
        self._history.append(_Before(*before, matched))
        self.length += 1

    def undo(self, count: int) -> None:
        """Forget the last ``count`` tokens, at most ``ROLLBACK_LIMIT``."""
        matched = 0
        for _ in range(count):
            before = self._history.pop()
            self._progress, self.ended, self.fault = before.progress, before.ended, before.fault
            matched += before.matched
        if matched:
            self._matcher.rollback(matched)
        self.length -= count

    def fill(self, mask: Mask, row: int) -> None:
        """Write which tokens may follow into ``mask[row]`` (``mask_words`` int32, 1 is allowed); everything where nothing is constrained."""
        words = mask[row]
        if self.ended or self.fault or not self.begun or not self._matcher.fill_mask(mask, row):
            words.fill(-1)
        elif not words.any():
            self.fault = "the grammar allows no token of the vocabulary here"
        elif len(self._extra):
            self._allow_ends(words)
        if not self.ended:
            if self.length < self._min_tokens:
                _deny(words, self._stop_ids, self._extra)
            elif len(self._ignored):
                _deny(words, self._ignored)

    def _allow_ends(self, words: Mask) -> None:
        """Ends of the request's own stand where the text may end. Where they were all that the grammar allows as text they stay."""
        complete = any(words[token >> 5] >> (token & 31) & 1 for token in self._stop_ids.tolist())
        kept = words.copy()
        _set_bits(words, self._extra, complete)
        if not words.any():
            words[:] = kept

    def _follow(self, token: int) -> int:
        at = self._progress
        while at and self._marker[at] != token:
            at = self._failure[at - 1]
        return at + (self._marker[at] == token)


def _failure_function(marker: Sequence[int]) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix."""
    table, at = [0] * len(marker), 0
    for i in range(1, len(marker)):
        while at and marker[i] != marker[at]:
            at = table[at - 1]
        at += marker[i] == marker[at]
        table[i] = at
    return table


def _deny(words: Mask, *groups: npt.NDArray[np.int64]) -> None:
    """Mask these ids, unless nothing else may follow."""
    kept = words.copy()
    for ids in groups:
        _set_bits(words, ids, False)
    if not words.any():
        words[:] = kept


def _set_bits(words: Mask, ids: npt.NDArray[np.int64], allowed: bool) -> None:
    unsigned = words.view(np.uint32)
    for token in ids.tolist():
        bit = np.uint32(1 << (token & 31))
        if allowed:
            unsigned[token >> 5] |= bit
        else:
            unsigned[token >> 5] &= ~bit

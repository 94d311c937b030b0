"""Grammars of the requests in the slots of one rank: follows their tokens and masks their logits.

Every rank has matchers of its own and draws the same tokens, so nothing about masks crosses ranks. A step's masks are made late: the forward pass is queued
first, then the tokens of the step before are waited for, so that the host fills masks while the device computes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenspeed.interfaces.grammar import CompiledGrammar, GrammarBackend, mask_words
from tokenspeed.runtime.grammar_state import GrammarState
from tokenspeed.runtime.plan import SlotRequest

__all__ = ["Drawn", "GrammarMasks", "GrammarStore", "SlotGrammars"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class Drawn(Protocol):
    """Tokens on their way to the host: ``runtime.transfer.Download``."""

    def wait(self) -> Int64:
        """(n, W) int64, the tokens of n rows."""


class GrammarStore:
    """Grammars ready for use, by key, the least recently used ones given up past ``max_bytes`` of serialised form. Thread safe: grammars are read in
    another thread than they are used in."""

    def __init__(self, backend: GrammarBackend, *, max_bytes: int = 64 << 20) -> None:
        self._backend = backend
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, tuple[CompiledGrammar, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes, data: bytes) -> CompiledGrammar:
        """The grammar of ``key``, read from ``data`` where it is not there; raises what the backend raises for bytes that are none."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
            compiled = self._backend.deserialize(data)
            self._entries[key] = compiled, len(data)
            self._bytes += len(data)
            while self._bytes > self._max_bytes and len(self._entries) > 1:
                self._bytes -= self._entries.popitem(last=False)[1][1]
            return compiled


@dataclass(frozen=True, kw_only=True)
class GrammarMasks:
    """Masks of n rows with W positions each.

    Attributes:
        bits: (n * W, words) int32, bit i % 32 of word i // 32 allows token i.
        faults: why a row cannot go on, by row.
    """

    bits: Int32
    faults: dict[int, str]


@dataclass(slots=True)
class _Pending:
    """Tokens of a step that the state has not seen yet: row ``row`` of ``drawn``, of which ``counts`` (all where ``None``) are valid."""

    drawn: Drawn
    row: int
    counts: Drawn | None


class _Entry:
    """A request's state, and what of it is still on the device."""

    __slots__ = ("key", "pending", "state")

    def __init__(self, key: bytes, state: GrammarState) -> None:
        self.key = key
        self.state = state
        self.pending: list[_Pending] = []

    def settle(self) -> None:
        """Take what was drawn; waits for the device where it still works on that."""
        pending, self.pending = self.pending, []
        for one in pending:
            tokens = one.drawn.wait()[one.row].tolist()
            count = len(tokens) if one.counts is None else int(one.counts.wait()[one.row])
            for token in tokens[:count]:
                self.state.take(token)


class SlotGrammars:
    """One entry per slot, loaded when a request begins there.

    A request that lost its slot keeps its matcher for when it comes back; what was made twice, or lost meanwhile, is made again from its output.

    Args:
        vocab_size: width of the logits.
        stop_ids: the model's stop tokens.
    """

    def __init__(self, store: GrammarStore, *, max_slots: int, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._store = store
        self._words = mask_words(vocab_size)
        self._stop_ids = tuple(stop_ids)
        self._slots: list[_Entry | str | None] = [None] * max_slots
        self._by_id: OrderedDict[int, _Entry] = OrderedDict()
        self._kept = 2 * max_slots + 64

    def load(self, request: SlotRequest) -> None:
        """Take over ``request.slot``. A grammar that cannot be read is that request's fault, told when it draws."""
        self._slots[request.slot] = None
        if request.grammar is None:
            return
        try:
            entry = self._entry(request)
        except Exception as error:  # whatever a backend does with bytes, the other rows go on
            self._slots[request.slot] = f"its grammar cannot be used: {type(error).__name__}: {error}"
            return
        self._slots[request.slot] = self._by_id[request.id] = entry
        while len(self._by_id) > self._kept:
            self._by_id.popitem(last=False)

    def _entry(self, request: SlotRequest) -> _Entry:
        grammar = request.grammar
        assert grammar is not None, "only requests with a grammar have an entry"
        output = np.frombuffer(request.output, dtype="<i4")
        kept = self._by_id.pop(request.id, None)
        if kept is not None and kept.key == grammar.key:
            kept.settle()
            if kept.state.length == len(output) and not kept.state.fault:
                return kept
        params = request.params
        state = GrammarState(
            self._store.get(grammar.key, grammar.compiled),
            reasoning_end=grammar.reasoning_end,
            end_ids=request.end_ids,
            stop_ids=self._stop_ids,
            ignored_ids=set(self._stop_ids).difference(params.stop_token_ids) if params.ignore_eos else (),
            min_tokens=params.min_tokens,
        )
        for token in output.tolist():
            state.take(token)
        return _Entry(grammar.key, state)

    def masks(self, slots: Int32, drafts: Int64 | None = None) -> GrammarMasks:
        """What may follow in each row; waits for the tokens of the step before.

        Args:
            slots: (n) slots with a grammar.
            drafts: (n, W - 1) tokens proposed after the row's last one, -1 for none; position j's mask holds if the first j of them are accepted. Behind a
                token that the grammar does not allow nothing is masked: that token cannot be accepted.
        """
        width = 1 if drafts is None else drafts.shape[1] + 1
        bits = np.empty((len(slots) * width, self._words), dtype=np.int32)
        faults: dict[int, str] = {}
        for row, slot in enumerate(slots.tolist()):
            entry = self._slots[slot]
            if not isinstance(entry, _Entry):  # a request that was aborted as it entered the slot still runs its step
                bits[row * width : (row + 1) * width] = -1
                if isinstance(entry, str):
                    faults[row] = entry
                continue
            try:
                entry.settle()
                _fill(entry.state, bits, row * width, () if drafts is None else drafts[row].tolist())
            except Exception as error:  # a matcher that breaks ends its own request alone
                entry.state.fault = f"its grammar failed: {type(error).__name__}: {error}"
            if entry.state.fault:
                bits[row * width : (row + 1) * width] = -1
                faults[row] = entry.state.fault
        return GrammarMasks(bits=bits, faults=faults)

    def drawn(self, slots: Int32, tokens: Drawn, counts: Drawn | None = None) -> None:
        """Tokens (n, W) of the rows in ``slots`` (n), of which ``counts`` (n) are valid; looked at when they are needed. A bad row's -1 ends its request."""
        for row, slot in enumerate(slots.tolist()):
            entry = self._slots[slot]
            if isinstance(entry, _Entry):
                entry.pending.append(_Pending(tokens, row, counts))


def _fill(state: GrammarState, bits: Int32, first: int, drafts: Sequence[int]) -> None:
    state.fill(bits, first)
    taken = 0
    for at, token in enumerate(drafts, first + 1):
        if token >= 0:
            state.take(token)
            taken += 1
        if token < 0 or state.fault:
            bits[at : first + len(drafts) + 1] = -1
            break
        state.fill(bits, at)
    if taken:
        state.undo(taken)

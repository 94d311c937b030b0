"""Grammars of the requests in the slots of one rank: follows their tokens and masks their logits.

Every rank has matchers of its own and draws the same tokens, so nothing about masks crosses ranks. A step's masks are made late: the forward pass is queued
first, then the tokens of the step before are waited for, so that the host fills masks while the device computes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenspeed.interfaces.grammar import CompiledGrammar, GrammarBackend, mask_words
from tokenspeed.runtime.grammar_state import GrammarState
from tokenspeed.runtime.plan import SlotRequest

__all__ = ["Drawn", "GrammarMasks", "GrammarStore", "SlotGrammars"]

#: Seconds of this thread's processor time that a row earns with each token it draws, with each token that is read again, and the most that it saves up.
#: A mask of an unambiguous grammar takes 0.02 to 0.5 ms; one of an ambiguous grammar grows with every token.
_EARNED_S = 0.010
_EARNED_AGAIN_S = 0.001
_SAVED_S = 0.100

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class Drawn(Protocol):
    """Tokens on their way to the host: ``runtime.transfer.Download``."""

    def wait(self) -> Int64:
        """(n, W) int64, the tokens of n rows."""


class GrammarStore:
    """Grammars ready for use, by key. Thread safe: grammars are read in another thread than they are used in.

    Args:
        backend: reads them.
        max_bytes: of memory that they take, as ``CompiledGrammar.nbytes`` tells, at least their serialised length; past it, and past ``max_grammars``, the
            least recently used ones are given up.
    """

    def __init__(self, backend: GrammarBackend, *, max_bytes: int = 64 << 20, max_grammars: int = 1024) -> None:
        self._backend = backend
        self._max_bytes = max_bytes
        self._max_grammars = max_grammars
        self._bytes = 0
        self._entries: OrderedDict[bytes, tuple[CompiledGrammar, int]] = OrderedDict()
        self._reading: dict[bytes, Future[CompiledGrammar]] = {}
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read grammars")

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes, data: bytes) -> CompiledGrammar:
        """The grammar of ``key``, read from ``data`` where it is not there; raises what the backend raises for bytes that are none.

        Only a call for the same key waits for what another thread reads.
        """
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
            reading = self._reading.get(key)
            if reading is None:
                mine = self._reading[key] = Future[CompiledGrammar]()
        if reading is not None:
            return reading.result()
        try:
            compiled = self._backend.deserialize(data)
        except BaseException as error:
            with self._lock:
                del self._reading[key]
            mine.set_exception(error)
            raise
        with self._lock:
            self._keep(key, compiled, max(compiled.nbytes, len(data)))
            del self._reading[key]
        mine.set_result(compiled)
        return compiled

    def ask(self, key: bytes, data: bytes) -> Future[CompiledGrammar]:
        """The same without a wait: done where the grammar is there, else read in the store's own thread."""
        with self._lock:
            kept = self._entries.get(key)
            if kept is not None:
                self._entries.move_to_end(key)
        if kept is None:
            return self._thread.submit(self.get, key, data)
        there = Future[CompiledGrammar]()
        there.set_result(kept[0])
        return there

    def _keep(self, key: bytes, compiled: CompiledGrammar, size: int) -> None:
        self._entries[key] = compiled, size
        self._bytes += size
        while len(self._entries) > 1 and (self._bytes > self._max_bytes or len(self._entries) > self._max_grammars):
            self._bytes -= self._entries.popitem(last=False)[1][1]


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
    """A request's state, what of it is still on the device, and the time that its grammar may take.

    ``clock`` tells seconds of processor time; ``None``: its time is not counted here.
    """

    __slots__ = ("_clock", "_saved_s", "key", "pending", "state")

    def __init__(self, key: bytes, state: GrammarState, clock: Callable[[], float] | None) -> None:
        self.key = key
        self.state = state
        self.pending: list[_Pending] = []
        self._clock = clock
        self._saved_s = _SAVED_S

    def settle(self) -> None:
        """Take what was drawn; waits for the device where it still works on that."""
        pending, self.pending = self.pending, []
        for one in pending:
            tokens = one.drawn.wait()[one.row].tolist()
            count = len(tokens) if one.counts is None else int(one.counts.wait()[one.row])
            for token in tokens[:count]:
                self.take(token)

    def take(self, token: int, earned_s: float = _EARNED_S) -> None:
        """The next token, which earns the row as much time."""
        began = self._now()
        self.state.take(token)
        self._saved_s = min(_SAVED_S, self._saved_s + earned_s)
        self._spend(began)

    def fill(self, bits: Int32, first: int, drafts: Sequence[int]) -> None:
        """The row's masks."""
        began = self._now()
        _fill(self.state, bits, first, drafts)
        self._spend(began)

    def _now(self) -> float:
        return 0.0 if self._clock is None else self._clock()

    def _spend(self, began: float) -> None:
        """What an ambiguous grammar costs grows with every token, and every other row waits for it."""
        self._saved_s -= self._now() - began
        if self._saved_s < 0 and not self.state.fault:
            self.state.fault = (
                f"its grammar takes more than {_EARNED_S * 1000:g} ms for each token to follow: it is ambiguous, so that a text can be read in ever "
                "more ways; write it so that there is one way to read each text (lists as item (item)*, not as list list)"
            )


@dataclass(frozen=True, slots=True)
class _Loading:
    """A request whose grammar is still read, while the forward passes over its prompt are queued."""

    request: SlotRequest
    compiled: Future[CompiledGrammar]


class SlotGrammars:
    """One entry per slot, loaded when a request begins there.

    A request that lost its slot keeps its matcher for when it comes back; what was made twice, or lost meanwhile, is made again from its output.

    Args:
        vocab_size: width of the logits.
        stop_ids: the model's stop tokens.
        clock: seconds of processor time of the calling thread, by which a request ends whose grammar takes too long to follow. ``None`` on ranks whose
            results nobody reads: rank 0 alone decides.
    """

    def __init__(
        self,
        store: GrammarStore,
        *,
        max_slots: int,
        vocab_size: int,
        stop_ids: Sequence[int],
        clock: Callable[[], float] | None = time.thread_time,
    ) -> None:
        self._store = store
        self._clock = clock
        self._words = mask_words(vocab_size)
        self._stop_ids = tuple(stop_ids)
        self._slots: list[_Entry | _Loading | str | None] = [None] * max_slots
        self._by_id: OrderedDict[int, _Entry] = OrderedDict()
        self._kept = 2 * max_slots + 64

    def load(self, request: SlotRequest) -> None:
        """Take over ``request.slot``; does not wait for a grammar that has to be read. One that cannot be is that request's fault, told when it draws."""
        slot, grammar = request.slot, request.grammar
        self._slots[slot] = None
        if grammar is None:
            return
        kept = self._by_id.pop(request.id, None)
        if kept is not None and kept.key == grammar.key and _goes_on(kept, len(request.output) // 4):
            self._enter(slot, request, kept)
            return
        loading = _Loading(request, self._store.ask(grammar.key, grammar.compiled))
        self._slots[slot] = loading
        if loading.compiled.done():
            self._loaded(slot, loading)

    def _loaded(self, slot: int, loading: _Loading) -> _Entry | str:
        """What stands in ``slot`` for a request whose grammar is read; waits until it is."""
        try:
            entry = self._entry(loading.request, loading.compiled.result())
        except Exception as error:  # whatever a backend does with bytes, the other rows go on
            fault = self._slots[slot] = f"its grammar cannot be used: {type(error).__name__}: {error}"
            return fault
        self._enter(slot, loading.request, entry)
        return entry

    def _enter(self, slot: int, request: SlotRequest, entry: _Entry) -> None:
        self._slots[slot] = self._by_id[request.id] = entry
        while len(self._by_id) > self._kept:
            self._by_id.popitem(last=False)

    def _entry(self, request: SlotRequest, compiled: CompiledGrammar) -> _Entry:
        grammar, params = request.grammar, request.params
        assert grammar is not None, "only requests with a grammar have an entry"
        state = GrammarState(
            compiled,
            reasoning_end=grammar.reasoning_end,
            end_ids=request.end_ids,
            stop_ids=self._stop_ids,
            ignored_ids=set(self._stop_ids).difference(params.stop_token_ids) if params.ignore_eos else (),
            min_tokens=params.min_tokens,
        )
        entry = _Entry(grammar.key, state, self._clock)
        for token in np.frombuffer(request.output, dtype="<i4").tolist():
            entry.take(token, _EARNED_AGAIN_S)
        return entry

    def masks(self, slots: Int32, drafts: Int64 | None = None) -> GrammarMasks:
        """What may follow in each row; waits for the tokens of the step before.

        Args:
            slots: (n) slots with a grammar.
            drafts: (n, W - 1) tokens proposed after the row's last one, -1 for none; position j's mask holds if the first j of them are accepted. Behind a
                token that the grammar does not allow nothing is masked: that token cannot be accepted. No drafter gives them yet.
        """
        width = 1 if drafts is None else drafts.shape[1] + 1
        bits = np.empty((len(slots) * width, self._words), dtype=np.int32)
        faults: dict[int, str] = {}
        for row, slot in enumerate(slots.tolist()):
            entry = self._slots[slot]
            if isinstance(entry, _Loading):
                entry = self._loaded(slot, entry)
            if not isinstance(entry, _Entry):  # a request that was aborted as it entered the slot still runs its step
                bits[row * width : (row + 1) * width] = -1
                if isinstance(entry, str):
                    faults[row] = entry
                continue
            try:
                entry.settle()
                entry.fill(bits, row * width, () if drafts is None else drafts[row].tolist())
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


def _goes_on(entry: _Entry, length: int) -> bool:
    """Whether a matcher that was kept stands where the request does, with ``length`` tokens of output; one that breaks is made again."""
    try:
        entry.settle()
    except Exception:
        return False
    return entry.state.length == length and not entry.state.fault


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

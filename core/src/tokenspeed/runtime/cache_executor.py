"""Carries out the cache operations of plans beside the forward, and says how each one ended."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.runtime.cache_ops import CacheOps, Hashes, Int32, Int64, Operation, runs
from tokenspeed.runtime.host_pool import HostPool
from tokenspeed.runtime.page_copies import PageCopies, PageMove, ThreadCopies
from tokenspeed.runtime.store_guard import StoreGuard
from tokenspeed.runtime.store_lane import StoreLane
from tokenspeed.runtime.stream_copies import StreamCopies

__all__ = ["CacheExecutor", "CacheStats"]

_log = logging.getLogger(__name__)

#: Operations of the store that may wait on one thread; more are answered as failed at once: a slow store must not hold the host tier's pages.
_WAITING = 64
_POLL_S = 0.0002


@dataclass
class CacheStats:
    """What was moved; cumulative. Pages and bytes; ``out`` and ``back`` are pages to and from the host by cache group."""

    written_back: int = 0
    written_back_bytes: int = 0
    loaded_back: int = 0
    loaded_back_bytes: int = 0
    failed: int = 0
    refused: int = 0
    out: Counter[int] = field(default_factory=Counter)
    back: Counter[int] = field(default_factory=Counter)


@dataclass(eq=False)
class _StoreThread:
    """One thread that asks the store, in the order of operations."""

    name: str
    lane: StoreLane
    work: queue.Queue[Callable[[], None] | None] = field(default_factory=lambda: queue.Queue(_WAITING))
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self.thread.start()

    def post(self, work: Callable[[], None]) -> bool:
        """False where too much waits already."""
        try:
            self.work.put_nowait(work)
        except queue.Full:
            return False
        return True

    def end(self, timeout_s: float) -> None:
        """What has begun ends; what waits is dropped."""
        while True:
            try:
                self.work.put_nowait(None)
                break
            except queue.Full:
                self.work.get_nowait()
        self.thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                work = self.work.get(timeout=self.lane.attend())
            except queue.Empty:
                continue
            if work is None:
                return
            work()


class CacheExecutor:
    """The tiers of one rank. ``begin``, ``finished`` and ``wait`` come from the thread that executes plans.

    Args:
        store: the L3 store, or ``None``.
        timeout_s: how long one operation of the store may go on beginning calls.
    """

    def __init__(
        self,
        host: HostPool,
        *,
        device: torch.device,
        store: StoreGuard | None = None,
        timeout_s: float = 0.5,
        copies: Callable[[HostPool, Callable[[int, int], None]], PageCopies] | None = None,
    ) -> None:
        self.host = host
        self.store = store
        self.stats = CacheStats()
        self._timeout_s = timeout_s
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._kept: list[tuple[int, int]] = []
        self._pages: dict[int, tuple[str, int, int]] = {}
        self._loading = False
        if copies is not None:
            self._copies = copies(host, self._done)
        elif device.type == "cpu":
            self._copies = ThreadCopies(host, self._done)
        else:
            self._copies = StreamCopies(host, self._done, device=device)
        self._loads = _StoreThread("kvstore loads", store.lanes[0]) if store is not None else None
        self._saves = _StoreThread("kvstore saves", store.lanes[1]) if store is not None else None

    @property
    def in_flight(self) -> int:
        """Operations that were begun and not told of yet."""
        return len(self._pages)

    def begin_plan(self, plan: object) -> None:
        """Start what ``plan`` asks for."""
        ops = CacheOps.of(plan)
        if ops is not None:
            self.begin(ops)

    def begin(self, ops: CacheOps) -> None:
        """Start everything, loads first: the forward waits for them. No page is in two operations of one plan."""
        loads = self._moves(
            "load_back", ops.load_back_op, ops.load_back_group, ops.load_back_device, ops.load_back_host
        )
        if loads:
            self._loading = True
            self._copies.load_back(loads)
        writes = self._moves(
            "write_back", ops.write_back_op, ops.write_back_group, ops.write_back_device, ops.write_back_host
        )
        if writes:
            self._copies.write_back(writes)
        for run in runs(ops.lookup_op, ops.lookup_group):
            self._begin_store("lookup", run, self._look_up, self._keys(ops.lookup_hash, run), None)
        for run in runs(ops.prefetch_op, ops.prefetch_group):
            self._begin_store("prefetch", run, self._prefetch, self._keys(ops.prefetch_hash, run), ops.prefetch_host)
        for run in runs(ops.store_op, ops.store_group):
            self._begin_store("store", run, self._save, self._keys(ops.store_hash, run), ops.store_host)

    def wait_layer(self, layer: int) -> None:
        """The forward is about to read ``layer``'s pages."""
        if self._loading:
            self._copies.wait_layer(layer)

    def wait_states(self) -> None:
        """States are about to be copied, and the forward to read them."""
        if self._loading:
            for group in self.host.state_groups:
                for part in self.host.parts[group]:
                    self._copies.wait_layer(part.layer)

    def wait_layers(self) -> None:
        """A captured forward is about to run."""
        if self._loading:
            self._copies.wait_all()

    def finished(self) -> list[tuple[int, int]]:
        """(number, leading pages that are good) of operations that have ended since the last call."""
        self._copies.poll()
        found, self._kept = self._kept, []
        while not self._ended.empty():  # this thread alone takes from it
            found.append(self._ended.get())
        for number, pages in found:
            self._count(number, pages)
        if self._loading and not any(kind == "load_back" for kind, _, _ in self._pages.values()):
            self._loading = False
        return found

    def wait(self, numbers: Collection[int]) -> dict[int, int]:
        """Wait until these operations, none of which ``finished`` has told of, have ended: their good pages. ``finished`` tells of them all the same."""
        wanted = set(numbers)
        while True:
            self._copies.poll()
            while not self._ended.empty():
                self._kept.append(self._ended.get())
            found = {number: pages for number, pages in self._kept if number in wanted}
            if found.keys() == wanted:
                return found
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the threads. What was not stored is lost; a store that hangs is left behind."""
        with ExitStack() as ending:  # the last one first, whatever raises
            if self.store is not None:
                ending.callback(self.store.close)
            for thread in (self._saves, self._loads):
                if thread is not None:
                    ending.callback(thread.end, self._timeout_s)
            ending.callback(self._copies.close)
            ending.callback(self._copies.settle)

    def _done(self, number: int, pages: int) -> None:
        self._ended.put((number, pages))

    def _moves(self, kind: str, numbers: Int64, groups: Int32, device: Int32, host: Int32) -> list[PageMove]:
        moves = []
        for run in runs(numbers, groups):
            self._pages[run.number] = (kind, run.group, run.pages)
            part = slice(run.begin, run.end)
            moves.append(PageMove(number=run.number, group=run.group, device=device[part], host=host[part]))
        return moves

    def _keys(self, hashes: Hashes, run: Operation) -> list[bytes]:
        return [row.tobytes() for row in hashes[run.begin : run.end]]

    def _begin_store(
        self,
        kind: str,
        run: Operation,
        work: Callable[[int, Sequence[bytes], Sequence[npt.NDArray[np.uint8]]], int],
        keys: Sequence[bytes],
        host: Int32 | None,
    ) -> None:
        thread = self._saves if kind == "store" else self._loads
        self._pages[run.number] = (kind, run.group, run.pages)
        pages = [] if host is None else [self.host.page(run.group, page) for page in host[run.begin : run.end].tolist()]

        def carry_out() -> None:
            try:
                good = work(run.group, keys, pages)
            except Exception:  # the guard takes what stores raise; this is our own fault, and still only a miss
                _log.exception("Operation %s of the KV store failed", kind)
                good = 0
            self._done(run.number, good)

        if thread is None or not thread.post(carry_out):
            self.stats.refused += 1
            self._done(run.number, 0)

    def _look_up(self, group: int, keys: Sequence[bytes], _: Sequence[npt.NDArray[np.uint8]]) -> int:
        assert self.store is not None
        return self.store.count(group, keys, time.monotonic() + self._timeout_s)

    def _prefetch(self, group: int, keys: Sequence[bytes], pages: Sequence[npt.NDArray[np.uint8]]) -> int:
        assert self.store is not None
        return self.store.load(group, keys, pages, time.monotonic() + self._timeout_s)

    def _save(self, group: int, keys: Sequence[bytes], pages: Sequence[npt.NDArray[np.uint8]]) -> int:
        assert self.store is not None
        return self.store.save(group, keys, pages, time.monotonic() + self._timeout_s)

    def _count(self, number: int, pages: int) -> None:
        kind, group, asked = self._pages.pop(number)
        size = pages * self.host.page_bytes[group]
        if kind == "write_back":
            self.stats.written_back += pages
            self.stats.written_back_bytes += size
            self.stats.out[group] += pages
        elif kind == "load_back":
            self.stats.loaded_back += pages
            self.stats.loaded_back_bytes += size
            self.stats.back[group] += pages
        if kind in ("write_back", "load_back"):
            self.stats.failed += asked - pages

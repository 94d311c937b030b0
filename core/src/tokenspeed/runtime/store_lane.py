"""One thread, one store object, and a clock on every call: what hangs is left behind, what fails is tried again later and not by a request.

States: *up* takes calls. A call that raises (whoever runs it raises for a wrong answer too) or passes its deadline makes the lane *down*: calls are refused
at once, until a probe that the lane sends by itself, after a pause that grows, is answered in time by a new object. A probe may pass where calls do not (a
full disk): pauses begin anew only where the lane was up for longer than the next one. A thread that hangs cannot be ended; it keeps its store and its
staging memory, which nobody else touches.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kvstore import KVStore

__all__ = ["LaneStats", "MakeStore", "StoreLane", "Turn", "aligned_memory"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: Makes a store over staging memory of its own.
MakeStore = Callable[[npt.NDArray[np.uint8]], KVStore]

#: How long opening and a probe may take where calls have less: nobody waits for them, and a library may need a while to find its cluster.
_PATIENCE_S = 5.0
#: How often an idle thread looks for the answer of a probe.
_LOOK_S = 0.05
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
#: Threads that may hang at once: a store that swallows every probe must not fill the process.
_HANGING = 4
_PAGE = 4096
#: A store's own count that is larger is none: sums of counts travel in 64 bits.
_MOST_COUNTED = 1 << 48


def aligned_memory(size: int) -> npt.NDArray[np.uint8]:
    """``size`` bytes of host memory that begin at a page of the system, as registered memory must."""
    raw = np.empty(size + _PAGE, dtype=np.uint8)
    skip = -raw.ctypes.data % _PAGE
    return raw[skip : skip + size]


@dataclass
class LaneStats:
    """What happened to calls; cumulative. ``bypassed`` were refused because the store was down."""

    calls: int = 0
    failures: int = 0
    timeouts: int = 0
    bypassed: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class _Call:
    run: Callable[[Turn], Any]
    done: threading.Event = field(default_factory=threading.Event)
    given_up: bool = False
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Turn:
    """What a call works with, on the lane's thread."""

    store: KVStore
    staging: npt.NDArray[np.uint8]
    _call: _Call

    @property
    def wanted(self) -> bool:
        """Whether someone still waits: while this is true, so was everything that the call has read of the caller's."""
        return not self._call.given_up


class _Worker:
    """A thread with its own store, made on the thread by its first call."""

    def __init__(self, make: MakeStore, staging_bytes: int, name: str) -> None:
        self._make = make
        self._staging_bytes = staging_bytes
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._store: KVStore | None = None
        #: what the store counted by the end of its last call; replaced, never changed
        self.counters: dict[str, int] = {}
        # A daemon: one that hangs in its store must not keep the process from ending.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def post(self, call: _Call) -> None:
        self._calls.put(call)

    def end(self) -> None:
        """Close the store and end the thread, once what it does now has ended."""
        self._calls.put(None)

    def _run(self) -> None:
        staging = aligned_memory(self._staging_bytes)
        while (call := self._calls.get()) is not None:
            try:
                if self._store is None:
                    self._store = self._make(staging)
                call.result = call.run(Turn(self._store, staging, call))
            except BaseException as error:  # a plugin may raise anything
                call.error = error
            self._read_counters()
            call.done.set()
        if self._store is not None:
            try:
                self._store.close()
            except BaseException as error:
                _log.warning("Closing a KV store failed: %s", _told(error))

    def _read_counters(self) -> None:
        """On this thread, within the call's deadline: reading is a plugin's code too, and figures must not wait for it."""
        if self._store is None:
            return
        try:
            counters = {str(name): int(count) for name, count in self._store.counters.items()}
            if not all(0 <= count < _MOST_COUNTED for count in counters.values()):
                raise ValueError("a count is below 0 or beyond all measure")
            self.counters = counters
        except BaseException as error:
            _log.debug("Reading a KV store's counters failed: %s", _told(error))


def _told(error: BaseException) -> str:
    """An error of a plugin in a line; its text is the plugin's code too."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return type(error).__name__


class StoreLane:
    """Calls a store within deadlines. ``call`` comes from one thread at a time; the properties may be read from any.

    Args:
        make: makes the store.
        staging_bytes: memory for the frames of one call.
        probe: a call that shows whether the store answers.
        patience_s: deadline of opening and of probes.
    """

    def __init__(
        self,
        make: MakeStore,
        *,
        name: str,
        staging_bytes: int,
        probe: Callable[[KVStore], Any],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.name = name
        self.stats = LaneStats()
        self._make = make
        self._staging_bytes = staging_bytes
        self._probe = probe
        self._patience_s = patience_s
        self._worker: _Worker | None = None
        self._past: Counter[str] = Counter()
        self._parting = threading.Lock()  # a worker's counters are in ``_past`` from when it is ``_worker`` no more
        self._hanging: list[_Worker] = []
        self._down = False
        self._pause_s = _FIRST_PAUSE_S
        self._probe_at_s = 0.0
        self._up_since_s = 0.0
        self._probing: tuple[_Call, float] | None = None

    @property
    def up(self) -> bool:
        """Whether calls are taken."""
        return not self._down

    @property
    def counters(self) -> dict[str, int]:
        """The stores' own, of all objects so far, as they were at the end of the last call. Never calls a store."""
        with self._parting:
            return dict(self._past + Counter(self._worker.counters if self._worker is not None else {}))

    def open(self) -> None:
        """Make the store and see whether it answers.

        Raises:
            ConfigError: what the store's constructor says a user must change.
        """
        call = self._post(lambda turn: self._probe(turn.store))
        if call.done.wait(self._patience_s) and isinstance(call.error, ConfigError):
            raise call.error
        self._settle(call)

    def call(self, run: Callable[[Turn], T], timeout_s: float) -> T | None:
        """The result of ``run``; ``None`` where it failed, took longer, the store is down, or no time is left to begin."""
        if timeout_s <= 0:
            return None
        if self._down and not self._recovered():
            self.stats.bypassed += 1
            return None
        began = time.monotonic()
        call = self._post(run)
        call.done.wait(timeout_s)
        self.stats.calls += 1
        self.stats.seconds += time.monotonic() - began
        return call.result if self._settle(call) else None

    def attend(self) -> float | None:
        """Ask a store that is down whether it answers again; from the thread that calls. Seconds until that is to be looked at again, ``None``: not before it
        falls. Without it a store would be down until the next request, and refuse that one."""
        if not self._down or self._recovered():
            return None
        if self._probing is not None:
            return _LOOK_S
        left_s = self._probe_at_s - time.monotonic()
        return left_s if left_s > 0 else 1.0  # due, and too many calls hang already

    def close(self, timeout_s: float) -> None:
        """End the thread; waits for the store's ``close`` at most so long."""
        for worker in [*self._hanging, *([self._worker] if self._worker else [])]:
            worker.end()
        if self._worker is not None:
            self._worker.thread.join(timeout_s)
        self._worker = None

    def _post(self, run: Callable[[Turn], Any]) -> _Call:
        if self._worker is None:
            self._worker = _Worker(self._make, self._staging_bytes, f"kvstore {self.name}")
        call = _Call(run)
        self._worker.post(call)
        return call

    def _settle(self, call: _Call) -> bool:
        """Whether ``call`` went well; otherwise the lane is down from now on."""
        if call.done.is_set():
            if call.error is None:
                return True
            self.stats.failures += 1
            self._part()
            self._fall(_told(call.error))
            return False
        call.given_up = True
        self.stats.timeouts += 1
        if (worker := self._part()) is not None:
            self._hanging.append(worker)  # what it returns in the end is for nobody
        self._fall("no answer by the deadline")
        return False

    def _part(self) -> _Worker | None:
        """Part with the worker, which closes its store when it can: an object that has failed is not trusted with the next call."""
        with self._parting:
            worker, self._worker = self._worker, None
            if worker is not None:
                self._past.update(worker.counters)
        if worker is not None:
            worker.end()
        return worker

    def _fall(self, reason: str) -> None:
        now = time.monotonic()
        if not self._down:
            _log.warning("KV store (%s): %s; it is bypassed until it answers again", self.name, reason)
            if now - self._up_since_s > self._pause_s:
                self._pause_s = _FIRST_PAUSE_S
        self._down = True
        self._probe_at_s = now + self._pause_s
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)

    def _recovered(self) -> bool:
        """Send a probe when one is due, look at the one that was sent; never waits."""
        now = time.monotonic()
        if self._probing is None:
            self._hanging = [worker for worker in self._hanging if worker.thread.is_alive()]
            if now >= self._probe_at_s and len(self._hanging) < _HANGING:
                self._probing = (self._post(lambda turn: self._probe(turn.store)), now + self._patience_s)
            return False
        call, until = self._probing
        if not call.done.is_set() and now < until:
            return False
        self._probing = None
        if not self._settle(call):
            return False
        _log.warning("KV store (%s): it answers again", self.name)
        self._down, self._up_since_s = False, now
        return True

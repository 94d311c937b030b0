"""Copies of pages between device and host, beside the forward.

On the host a thread copies; the forward waits for a layer's pages where it reads them. On an accelerator the copies go on a stream of their own
(``stream_copies``), in slices of a few layers, with an event after each slice that the forward waits for.

Order (nobody else keeps it): a page is copied out after the step that wrote it has ended, for a plan names only pages of advanced steps; a page is copied in
after everything that was queued before this plan, which may have read the page's former content; the scheduler gives neither page to anyone before it is
told that the copy has ended.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.runtime.host_pool import HostPool

__all__ = ["Done", "PageCopies", "PageMove", "ThreadCopies"]

_log = logging.getLogger(__name__)

#: Takes an operation's number and its good pages.
Done = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class PageMove:
    """One operation: page ``device[i]`` of ``group`` to or from host page ``host[i]``."""

    number: int
    group: int
    device: npt.NDArray[np.int32]
    host: npt.NDArray[np.int32]


class PageCopies(ABC):
    """Moves pages; tells ``done(number, pages)`` from any thread when an operation has ended, with 0 pages where it failed."""

    @abstractmethod
    def write_back(self, moves: Sequence[PageMove]) -> None:
        """Copy to the host."""

    @abstractmethod
    def load_back(self, moves: Sequence[PageMove]) -> None:
        """Copy to the device; the forward that comes next waits for its layers."""

    @abstractmethod
    def wait_layer(self, layer: int) -> None:
        """Called by the forward before it reads the layer's pages."""

    @abstractmethod
    def wait_all(self) -> None:
        """Called before a captured forward, which cannot wait layer by layer."""

    @abstractmethod
    def poll(self) -> None:
        """Tell of copies that have ended."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until every copy that was begun has ended, and tell of it."""

    def close(self) -> None:
        """Nothing more is copied."""


@dataclass(eq=False)
class _Load:
    """Load-backs of one plan on the thread; ``reached`` holds a flag for each layer."""

    moves: Sequence[PageMove]
    reached: dict[int, threading.Event] = field(default_factory=dict)


class ThreadCopies(PageCopies):
    """For pools in host memory."""

    def __init__(self, host: HostPool, done: Done) -> None:
        self._host = host
        self._done = done
        self._bytes = [[[_as_bytes(tensor) for tensor in part.tensors] for part in parts] for parts in host.parts]
        self._loads: list[_Load] = []
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv page copies", daemon=True)
        self._thread.start()

    def write_back(self, moves: Sequence[PageMove]) -> None:
        for move in moves:
            self._work.put(lambda move=move: self._write(move))  # type: ignore[misc]

    def load_back(self, moves: Sequence[PageMove]) -> None:
        load = _Load(moves)
        for move in moves:
            for part in self._host.parts[move.group]:
                load.reached.setdefault(part.layer, threading.Event())
        self._loads.append(load)
        self._work.put(lambda: self._load(load))

    def wait_layer(self, layer: int) -> None:
        for load in self._loads:
            if layer in load.reached:
                load.reached[layer].wait()

    def wait_all(self) -> None:
        for load in self._loads:
            for reached in load.reached.values():
                reached.wait()

    def poll(self) -> None:
        self._loads = [load for load in self._loads if not all(each.is_set() for each in load.reached.values())]

    def settle(self) -> None:
        ended: Future[None] = Future()
        self._work.put(lambda: ended.set_result(None))
        ended.result()
        self.poll()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _write(self, move: PageMove) -> None:
        try:
            self._write_pages(move)
        except Exception as error:
            self._failed([move], error)
        else:
            self._done(move.number, len(move.host))

    def _failed(self, moves: Sequence[PageMove], error: Exception) -> None:
        """A copy that failed is a miss."""
        _log.error("Copying pages failed: %s: %s", type(error).__name__, error)
        for move in moves:
            self._done(move.number, 0)

    def _write_pages(self, move: PageMove) -> None:
        rows = self._host.rows(move.group).numpy()
        for part, tensors in zip(self._host.parts[move.group], self._bytes[move.group], strict=True):
            at = part.offset
            for pages in tensors:
                end = at + pages.shape[1]
                for device, host in zip(move.device.tolist(), move.host.tolist(), strict=True):
                    rows[host, at:end] = pages[device]
                at = end

    def _load(self, load: _Load) -> None:
        try:
            self._load_layers(load)
        except Exception as error:
            self._failed(load.moves, error)
        else:
            for move in load.moves:
                self._done(move.number, len(move.host))
        finally:
            for reached in load.reached.values():
                reached.set()

    def _load_layers(self, load: _Load) -> None:
        """States first: they are wanted before the forward begins. Then layer by layer."""
        states = self._host.state_groups
        work = [
            (move.group not in states, part.layer, move, index)
            for move in load.moves
            for index, part in enumerate(self._host.parts[move.group])
        ]
        left = Counter(layer for _, layer, _, _ in work)
        for _, layer, move, index in sorted(work, key=lambda each: each[:2]):
            self._load_part(move, index)
            left[layer] -= 1
            if not left[layer]:
                load.reached[layer].set()

    def _load_part(self, move: PageMove, index: int) -> None:
        rows, at = self._host.rows(move.group).numpy(), self._host.parts[move.group][index].offset
        for pages in self._bytes[move.group][index]:
            end = at + pages.shape[1]
            for device, host in zip(move.device.tolist(), move.host.tolist(), strict=True):
                pages[device] = rows[host, at:end]
            at = end


def _as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """(pages, bytes) uint8 over the memory of ``tensor`` (pages, ...)."""
    flat: npt.NDArray[np.uint8] = tensor.view(torch.uint8).reshape(tensor.shape[0], -1).numpy()
    return flat

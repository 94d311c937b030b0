"""Copies of pages between device and host, beside the forward.

On the host a thread copies; the forward waits for a layer's pages where it reads them. On an accelerator the copies go on a stream of their own, in slices of
a few layers, with an event after each slice that the forward waits for.

Order (nobody else keeps it): a page is copied out after the step that wrote it has ended, for a plan names only pages of advanced steps; a page is copied in
after everything that was queued before this plan, which may have read the page's former content; the scheduler gives neither page to anyone before it is
told that the copy has ended.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.runtime.host_pool import HostPool, part_bytes
from tokenspeed.types import CacheGroup

__all__ = ["PageCopies", "PageMove", "StreamCopies", "ThreadCopies", "staging_bytes"]

_log = logging.getLogger(__name__)

Done = Callable[[int, int], None]

#: Layers of a slice, and pages that share the staging buffer.
_LAYERS, _CHUNK = 12, 32


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
        by_layer: dict[int, list[tuple[PageMove, int]]] = {}
        for move in load.moves:
            for index, part in enumerate(self._host.parts[move.group]):
                by_layer.setdefault(part.layer, []).append((move, index))
        for layer in sorted(by_layer):
            for move, index in by_layer[layer]:
                self._load_part(move, index)
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


@dataclass(eq=False)
class _Flying:
    """Operations whose last copy ``event`` stands behind. Those that ``failed`` may have copies under way too: their pages are told of no sooner."""

    moves: Sequence[PageMove]
    event: torch.Event
    failed: bool


def staging_bytes(groups: Sequence[CacheGroup], page_size: int, element_bytes: int) -> int:
    """Memory of the device that ``StreamCopies`` takes, at most."""
    layers = [(group.bytes_per_token(element_bytes), len(group.layers)) for group in groups]
    slices = [
        -(-size * (min(_LAYERS, count) + 1) // count) for size, count in layers
    ]  # a layer more for what is gathered
    return _CHUNK * page_size * max(slices)


class StreamCopies(PageCopies):
    """For pools in the memory of an accelerator, and pinned host pages.

    A slice of ``layers`` layers of a page is one copy between host and a staging buffer on the device, and one kernel for each tensor between staging and
    pages: copying tensor by tensor would cost hundreds of launches a page. ``chunk`` pages share the buffer, whose size ``staging_bytes`` tells.

    Copies of a plan that cannot be launched, for want of memory as a rule, are misses.
    """

    def __init__(
        self, host: HostPool, done: Done, *, device: torch.device, layers: int = _LAYERS, chunk: int = _CHUNK
    ) -> None:
        self._host = host
        self._done = done
        self._device = device
        self._layers, self._chunk = layers, chunk
        self._stream = torch.Stream(device)
        self._flying: list[_Flying] = []
        self._reached: dict[int, torch.Event] = {}
        slices = [self._slices(group) for group in range(len(host.parts))]
        self._group_slices = slices
        size = max(end - begin for each in slices for begin, end, _ in each)
        self._staging = torch.empty((chunk, size), dtype=torch.uint8, device=device)
        widest = max(part_bytes(tensor) for parts in host.parts for part in parts for tensor in part.tensors)
        self._gathered = torch.empty(chunk * widest, dtype=torch.uint8, device=device)

    def write_back(self, moves: Sequence[PageMove]) -> None:
        self._launch(moves, self._write)

    def load_back(self, moves: Sequence[PageMove]) -> None:
        self._launch(moves, self._load)

    def _launch(self, moves: Sequence[PageMove], queue_copies: Callable[[Sequence[PageMove]], None]) -> None:
        self._begin()
        failed = False
        with self._stream:
            try:
                queue_copies(moves)
            except (RuntimeError, MemoryError) as error:
                _log.error("Copying pages failed: %s: %s", type(error).__name__, error)
                failed = True
            event = torch.Event(self._device.type)
            event.record(self._stream)
        self._flying.append(_Flying(moves, event, failed))

    def _write(self, moves: Sequence[PageMove]) -> None:
        for move, chunks in zip(moves, self._chunks(moves), strict=True):
            rows = self._host.rows(move.group)
            for begin, end, parts in self._group_slices[move.group]:
                for device, host in chunks:
                    staging = self._staging[: len(host), : end - begin]
                    self._gather(move.group, parts, device, staging, begin)
                    for i, page in enumerate(host):
                        rows[page, begin:end].copy_(staging[i], non_blocking=True)

    def _load(self, moves: Sequence[PageMove]) -> None:
        chunks = self._chunks(moves)
        for turn in range(max(len(slices) for slices in self._group_slices)):
            reached = []
            for move, move_chunks in zip(moves, chunks, strict=True):
                slices = self._group_slices[move.group]
                if turn >= len(slices):
                    continue
                begin, end, parts = slices[turn]
                rows = self._host.rows(move.group)
                for device, host in move_chunks:
                    staging = self._staging[: len(host), : end - begin]
                    for i, page in enumerate(host):
                        staging[i].copy_(rows[page, begin:end], non_blocking=True)
                    self._scatter(move.group, parts, device, staging, begin)
                reached += [self._host.parts[move.group][part].layer for part in parts]
            event = torch.Event(self._device.type)
            event.record(self._stream)
            self._reached.update(dict.fromkeys(reached, event))

    def wait_layer(self, layer: int) -> None:
        if (event := self._reached.get(layer)) is not None:
            event.wait(torch.accelerator.current_stream(self._device))

    def wait_all(self) -> None:
        for event in dict.fromkeys(self._reached.values()):
            event.wait(torch.accelerator.current_stream(self._device))

    def poll(self) -> None:
        while self._flying and self._flying[0].event.query():
            flying = self._flying.pop(0)
            for move in flying.moves:
                self._done(move.number, 0 if flying.failed else len(move.host))
        if not self._flying:
            self._reached.clear()

    def settle(self) -> None:
        self._stream.synchronize()
        self.poll()

    def close(self) -> None:
        self._stream.synchronize()

    def _begin(self) -> None:
        """Copies begin after what was queued so far: the step that wrote the pages, or the one that last read what they held."""
        before = torch.Event(self._device.type)
        before.record(torch.accelerator.current_stream(self._device))
        before.wait(self._stream)

    def _slices(self, group: int) -> list[tuple[int, int, range]]:
        """(begin, end, parts) of a host page's bytes, a few layers each."""
        parts = self._host.parts[group]
        cut = []
        for first in range(0, len(parts), self._layers):
            indices = range(first, min(first + self._layers, len(parts)))
            last = parts[indices[-1]]
            cut.append((parts[first].offset, last.offset + last.nbytes, indices))
        return cut

    def _chunks(self, moves: Sequence[PageMove]) -> list[list[tuple[torch.Tensor, list[int]]]]:
        """Of each move: device pages, as an index on the device, and host pages, as many as staging holds. One upload for all of them."""
        pages = np.concatenate([move.device for move in moves]).astype(np.int64)
        index = torch.from_numpy(pages).pin_memory().to(self._device, non_blocking=True)
        chunks, begin = [], 0
        for move in moves:
            host, own = move.host.tolist(), index[begin : begin + len(move.host)]
            starts = range(0, len(host), self._chunk)
            chunks.append([(own[at : at + self._chunk], host[at : at + self._chunk]) for at in starts])
            begin += len(host)
        return chunks

    def _gather(self, group: int, parts: range, device: torch.Tensor, staging: torch.Tensor, begin: int) -> None:
        for pages, at, size in self._places(group, parts, begin):
            gathered = self._gathered[: len(device) * size].view(len(device), size)
            torch.index_select(pages, 0, device, out=gathered)
            staging[:, at : at + size].copy_(gathered)

    def _scatter(self, group: int, parts: range, device: torch.Tensor, staging: torch.Tensor, begin: int) -> None:
        for pages, at, size in self._places(group, parts, begin):
            pages.index_copy_(0, device, staging[:, at : at + size])

    def _places(self, group: int, parts: range, begin: int) -> list[tuple[torch.Tensor, int, int]]:
        """(pages (n, bytes) uint8, offset in staging, bytes) of each tensor of the slice."""
        found = []
        for index in parts:
            part = self._host.parts[group][index]
            at = part.offset - begin
            for tensor in part.tensors:
                size = part_bytes(tensor)
                found.append((tensor.view(torch.uint8).view(tensor.shape[0], -1), at, size))
                at += size
        return found

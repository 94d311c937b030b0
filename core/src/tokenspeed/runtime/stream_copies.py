"""Copies of pages between an accelerator and pinned host memory, on a stream of their own; ``page_copies`` says what their order rests on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed.runtime.host_pool import HostPool, part_bytes
from tokenspeed.runtime.kv_pool import layer_bytes, named_groups
from tokenspeed.runtime.page_copies import Done, PageCopies, PageMove
from tokenspeed.types import CacheGroup

__all__ = ["StreamCopies", "staging_bytes"]

_log = logging.getLogger(__name__)

#: Layers of a slice, and pages that share the staging buffer of so many bytes: fewer where those are large, such as states.
_LAYERS, _CHUNK, _STAGING = 12, 32, 96 << 20

#: Device pages, as an index on the device, and as many host pages.
_Chunks = list[tuple[torch.Tensor, list[int]]]


@dataclass(eq=False)
class _Flying:
    """Operations whose last copy ``event`` stands behind. Those that ``failed`` may have copies under way too: their pages are told of no sooner."""

    moves: Sequence[PageMove]
    event: torch.Event
    failed: bool


def staging_bytes(groups: Sequence[CacheGroup], page_size: int, element_bytes: int) -> int:
    """Memory of the device that ``StreamCopies`` takes."""
    takes = []
    for index in range(len(groups)):
        sizes = [
            (layer, layer_bytes(group, page_size, element_bytes))
            for group in named_groups(groups, index)
            for layer in group.layers
        ]
        takes.append(_Slices([tensors for _, tensors in sorted(sizes, key=lambda each: each[0])], _LAYERS, _CHUNK))
    return max(each.staging for each in takes) + max(each.gathered for each in takes)


class _Slices:
    """A page of one group cut into slices of a few layers, and how many pages share the staging buffer.

    Args:
        sizes: bytes of each tensor of each layer, of one page.
    """

    def __init__(self, sizes: Sequence[Sequence[int]], layers: int, chunk: int) -> None:
        self.parts: list[range] = []
        begin, held = 0, 0
        for index, tensors in enumerate(sizes):
            if index > begin and (index - begin == layers or held + sum(tensors) > _STAGING):
                self.parts.append(range(begin, index))
                begin, held = index, 0
            held += sum(tensors)
        if sizes:
            self.parts.append(range(begin, len(sizes)))
        widest = max((sum(sum(sizes[part]) for part in parts) for parts in self.parts), default=0)
        #: pages of a copy
        self.chunk = max(1, min(chunk, _STAGING // max(1, widest)))
        #: bytes of the staging buffer, and of what is gathered of one tensor
        self.staging = self.chunk * widest
        self.gathered = self.chunk * max((size for tensors in sizes for size in tensors), default=0)


class StreamCopies(PageCopies):
    """For pools in the memory of an accelerator, and pinned host pages.

    A slice of ``layers`` layers of a page is one copy between host and a staging buffer on the device, and one kernel for each tensor between staging and
    pages: copying tensor by tensor would cost hundreds of launches a page. ``chunk`` pages share the buffer, fewer where they are large; ``staging_bytes``
    tells its size.

    Copies of a plan that cannot be launched, for want of memory as a rule, are misses.
    """

    def __init__(
        self, host: HostPool, done: Done, *, device: torch.device, layers: int = _LAYERS, chunk: int = _CHUNK
    ) -> None:
        self._host = host
        self._done = done
        self._device = device
        self._stream = torch.Stream(device)
        self._flying: list[_Flying] = []
        self._reached: dict[int, torch.Event] = {}
        self._slices = [
            _Slices([[part_bytes(tensor) for tensor in part.tensors] for part in parts], layers, chunk)
            for parts in host.parts
        ]
        self._spans = [self._spans_of(group) for group in range(len(host.parts))]
        self._staging = torch.empty(max(each.staging for each in self._slices), dtype=torch.uint8, device=device)
        self._gathered = torch.empty(max(each.gathered for each in self._slices), dtype=torch.uint8, device=device)

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
            for begin, end, parts in self._spans[move.group]:
                for device, host in chunks:
                    staging = self._staged(len(host), end - begin)
                    self._gather(move.group, parts, device, staging, begin)
                    for i, page in enumerate(host):
                        rows[page, begin:end].copy_(staging[i], non_blocking=True)

    def _load(self, moves: Sequence[PageMove]) -> None:
        """States first: they are wanted before the forward begins. Then the first slices of all, the second ones, and so on."""
        pairs = list(zip(moves, self._chunks(moves), strict=True))
        states = [pair for pair in pairs if pair[0].group in self._host.state_groups]
        self._load_slices(states)
        self._load_slices([pair for pair in pairs if pair[0].group not in self._host.state_groups])

    def _load_slices(self, moves: Sequence[tuple[PageMove, _Chunks]]) -> None:
        for turn in range(max((len(self._spans[move.group]) for move, _ in moves), default=0)):
            reached = []
            for move, chunks in moves:
                spans = self._spans[move.group]
                if turn >= len(spans):
                    continue
                begin, end, parts = spans[turn]
                rows = self._host.rows(move.group)
                for device, host in chunks:
                    staging = self._staged(len(host), end - begin)
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

    def _spans_of(self, group: int) -> list[tuple[int, int, range]]:
        """(begin, end, parts) of a host page's bytes, slice by slice."""
        parts = self._host.parts[group]
        return [
            (parts[each[0]].offset, parts[each[-1]].offset + parts[each[-1]].nbytes, each)
            for each in self._slices[group].parts
        ]

    def _staged(self, pages: int, size: int) -> torch.Tensor:
        """(pages, size) uint8: the buffer's first bytes."""
        return self._staging[: pages * size].view(pages, size)

    def _chunks(self, moves: Sequence[PageMove]) -> list[_Chunks]:
        """Of each move: device pages, as an index on the device, and host pages, as many as staging holds. One upload for all of them."""
        pages = np.concatenate([move.device for move in moves]).astype(np.int64)
        index = torch.from_numpy(pages).pin_memory().to(self._device, non_blocking=True)
        chunks, begin = [], 0
        for move in moves:
            host, own, size = move.host.tolist(), index[begin : begin + len(move.host)], self._slices[move.group].chunk
            chunks.append([(own[at : at + size], host[at : at + size]) for at in range(0, len(host), size)])
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

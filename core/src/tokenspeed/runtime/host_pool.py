"""The host tier of one rank: rows of memory, each of which holds what one page of its cache group names: keys and values of every layer, or a state.

Full groups move in lockstep under one page id, so that a host page of group 0 holds the layers of all of them, and the others have host pages of no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.runtime.kv_pool import KVPool

__all__ = ["HostPool", "PageParts", "host_pages", "part_bytes"]


@dataclass(frozen=True)
class PageParts:
    """Where a layer's part of a page lies: ``tensors`` of the device pool, pages first, stand one after another from byte ``offset`` of a host page."""

    layer: int
    offset: int
    tensors: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's part."""
        return sum(part_bytes(tensor) for tensor in self.tensors)


def part_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one page in ``tensor`` (pages, ...)."""
    return tensor[0].numel() * tensor.element_size()


def host_pages(page_bytes: Sequence[int], device_pages: Sequence[int], *, ratio: float, size: int | None) -> list[int]:
    """Host pages of each group: ``ratio`` times the device's, or what ``size`` bytes hold with the same shares; not all pages are of no bytes."""
    if size is None:
        return [int(pages * ratio) for pages in device_pages]
    total = sum(each * pages for each, pages in zip(page_bytes, device_pages, strict=True))
    return [pages * size // total for pages in device_pages]


class HostPool:
    """Host pages of each cache group.

    Args:
        pinned: for devices that copy from and to host memory by themselves.
    """

    def __init__(self, pool: KVPool, pages: Sequence[int], *, pinned: bool) -> None:
        self.parts: list[list[PageParts]] = []
        self.page_bytes: list[int] = []
        self.num_pages = tuple(pages)
        #: groups whose pages are states: these are copied and zeroed before the forward, which reads a layer's pages when it comes to it
        self.state_groups = frozenset(i for i, group in enumerate(pool.groups) if group.kind == "recurrent")
        self._rows: list[torch.Tensor] = []
        for index, count in enumerate(pages):
            parts, offset = [], 0
            for layer, tensors in pool.page_tensors(index):
                parts.append(PageParts(layer, offset, tensors))
                offset += parts[-1].nbytes
            self.parts.append(parts)
            self.page_bytes.append(offset)
            self._rows.append(_rows(count, offset, pinned=pinned))

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(rows.nbytes for rows in self._rows)

    def rows(self, group: int) -> torch.Tensor:
        """(pages, page_bytes) uint8."""
        return self._rows[group]

    def page(self, group: int, index: int) -> npt.NDArray[np.uint8]:
        """(page_bytes) uint8: the memory itself."""
        row: npt.NDArray[np.uint8] = self._rows[group][index].numpy()
        return row


def _rows(count: int, size: int, *, pinned: bool) -> torch.Tensor:
    """(count, size) uint8."""
    if pinned:
        return torch.empty((count, size), dtype=torch.uint8, pin_memory=True)
    # From calloc: the system hands out memory as pages are first written.
    return torch.from_numpy(np.zeros((count, size), dtype=np.uint8))

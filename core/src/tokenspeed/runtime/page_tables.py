"""Persistent page tables: (slots, pages) per cache group, changed by a plan's deltas and never rebuilt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["PageTables"]

Int32 = npt.NDArray[np.int32]


class PageTables:
    """Page of token ``i`` of slot ``s`` in group ``g``: ``table[g][s, i // page_size]``.

    The host copy is the master (slot mappings are computed there); on a host device the tensors share its memory.

    Args:
        max_pages: columns per group, pages of the longest request.
    """

    def __init__(self, *, max_slots: int, max_pages: Sequence[int], device: torch.device) -> None:
        self.host: tuple[Int32, ...] = tuple(np.zeros((max_slots, pages), dtype=np.int32) for pages in max_pages)
        on_host = device.type == "cpu"
        self.device: tuple[torch.Tensor, ...] = tuple(
            torch.from_numpy(table) if on_host else torch.zeros(table.shape, dtype=torch.int32, device=device)
            for table in self.host
        )
        self._mirrored = not on_host

    def apply(self, groups: Int32, slots: Int32, indices: Int32, pages: Int32) -> None:
        """Set ``table[groups[i]][slots[i], indices[i]] = pages[i]`` for all i; of two writes to one entry the later wins."""
        if not len(groups):
            return
        for number, table in enumerate(self.host):
            if len(self.host) > 1:
                chosen = groups == number
                slot, index, page = slots[chosen], indices[chosen], pages[chosen]
            else:
                slot, index, page = slots, indices, pages
            table[slot, index] = page
            if self._mirrored:
                target = self.device[number]
                # Read back from the master: an index pair that appears twice has no defined order on a device.
                values = torch.from_numpy(table[slot, index]).to(target.device)
                where = (torch.from_numpy(slot.astype(np.int64)), torch.from_numpy(index.astype(np.int64)))
                target.index_put_(tuple(axis.to(target.device) for axis in where), values)

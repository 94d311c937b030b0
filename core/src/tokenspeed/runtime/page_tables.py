"""Persistent page tables: (slots, pages) per cache group, changed by a plan's deltas and never rebuilt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.runtime.transfer import upload

__all__ = ["PageTables"]

Int32 = npt.NDArray[np.int32]


class PageTables:
    """Page of token ``i`` of slot ``s`` in group ``g``: ``table[g][s, i // page_size]``.

    The host copy is the master (slot mappings are computed there); on a host device the tensors share its memory. One slot more than asked for,
    ``spare``, belongs to no request: rows that only fill a captured graph up point there.

    Args:
        max_pages: columns per group, pages of the longest request.
    """

    def __init__(self, *, max_slots: int, max_pages: Sequence[int], device: torch.device) -> None:
        self.spare = max_slots
        self.host: tuple[Int32, ...] = tuple(np.zeros((max_slots + 1, pages), dtype=np.int32) for pages in max_pages)
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
            if self._mirrored and len(slot):
                target = self.device[number]
                where = slot.astype(np.int64) * table.shape[1] + index
                # Read back from the master: an entry that appears twice has no defined order on a device.
                at, values = upload([where, table[slot, index]], target.device)
                target.view(-1).index_copy_(0, at, values)

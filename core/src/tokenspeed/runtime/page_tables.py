"""Persistent page tables: (slots, pages) per cache group, changed by a plan's deltas and never rebuilt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.runtime.transfer import upload
from tokenspeed.types import CacheGroup

__all__ = ["PageTables", "make_tables"]

Int32 = npt.NDArray[np.int32]


class PageTables:
    """Page of token ``i`` of slot ``s`` in group ``g``: ``table[g][s, i // page_size]``.

    The host copy is the master (slot mappings are computed there); on a host device the tensors share its memory. One slot more than asked for,
    ``spare``, belongs to no request: rows that only fill a captured graph up point there.

    A recurrent group's table has one column, the state of the slot. Groups with the same pages (all full ones) have one table.

    Args:
        max_pages: columns per group, pages of the longest request; 1 for a recurrent group.
        same: per group the first group that has its table; default: each has its own.
    """

    def __init__(
        self, *, max_slots: int, max_pages: Sequence[int], device: torch.device, same: Sequence[int] | None = None
    ) -> None:
        self.spare = max_slots
        self._own = tuple(same if same is not None else range(len(max_pages)))
        tables = {group: np.zeros((max_slots + 1, max_pages[group]), dtype=np.int32) for group in set(self._own)}
        on_host = device.type == "cpu"
        tensors = {
            group: torch.from_numpy(table) if on_host else torch.zeros(table.shape, dtype=torch.int32, device=device)
            for group, table in tables.items()
        }
        self.host: tuple[Int32, ...] = tuple(tables[group] for group in self._own)
        self.device: tuple[torch.Tensor, ...] = tuple(tensors[group] for group in self._own)
        self._mirrored = not on_host

    def set_spare(self, group: int, page: int) -> None:
        """Rows of the spare slot have ``page`` of ``group`` from now on; in a group of states they write there."""
        self.host[group][self.spare] = page
        if self._mirrored:
            self.device[group][self.spare] = page

    def apply(self, groups: Int32, slots: Int32, indices: Int32, pages: Int32) -> None:
        """Set ``table[groups[i]][slots[i], indices[i]] = pages[i]`` for all i; of two writes to one entry the later wins. What concerns groups that share a
        table names the first of them."""
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


def make_tables(
    groups: Sequence[CacheGroup], *, page_size: int, max_slots: int, max_model_len: int, device: torch.device
) -> PageTables:
    """The tables of a model's cache groups, as the scheduler's plans fill them."""
    # A row may hold a page more than its length needs: the step that reaches the limit is planned with room to spare.
    longest = -(-max_model_len // page_size) + 1
    return PageTables(
        max_slots=max_slots,
        max_pages=[1 if group.kind == "recurrent" else longest for group in groups],
        device=device,
        same=[0 if group.keeps_all else index for index, group in enumerate(groups)],
    )

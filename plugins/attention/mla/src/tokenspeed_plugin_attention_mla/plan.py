"""How decode rows are dealt out: equal stretches of all rows' latents, one range a group of programs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenspeed_plugin_attention_mla.attend import ITEM_FIELDS

__all__ = ["Plan", "plan_decode", "plan_extend"]


@dataclass(frozen=True)
class Plan:
    """All int32; see ``attend`` for the fields of an item.

    Attributes:
        items: (n, ITEM_FIELDS) in the order of rows.
        ranges: (groups + 1) first item of each group of programs.
        parts: (rows + 1) first part of each row; a row that is read in one piece has none.
    """

    items: np.ndarray
    ranges: np.ndarray
    parts: np.ndarray

    @property
    def split(self) -> bool:
        """Whether any row is read in several pieces."""
        return bool(self.parts[-1])


def plan_decode(seq_lens: np.ndarray, *, groups: int, block: int, least: int = 2) -> Plan:
    """Cut the rows, laid end to end in blocks of ``block`` latents, into ``groups`` stretches of equal length (the last may be shorter), of ``least`` blocks at
    least. There are at most ``rows + groups`` items and ``2 * groups`` parts.

    Args:
        seq_lens: (rows) latents to read, upper bounds.
    """
    # A row with nothing to read still has zeros to write.
    blocks = np.maximum(1, -(-seq_lens.astype(np.int64) // block))
    ends = np.cumsum(blocks)
    total = int(ends[-1])
    quota = max(least, -(-total // groups))
    cuts = np.unique(np.concatenate([[0], ends, np.arange(quota, total, quota)]))
    first, last = cuts[:-1], cuts[1:]
    row = np.searchsorted(ends, first, side="right")
    begin = first - (ends - blocks)[row]
    piece = last - first < blocks[row]
    items = np.zeros((first.size, ITEM_FIELDS), dtype=np.int32)
    items[:, 0] = row
    items[:, 2] = begin * block
    items[:, 3] = np.minimum((begin + last - first) * block, seq_lens[row])
    items[:, 4] = np.where(piece, np.cumsum(piece) - 1, -1)
    parts = np.concatenate([[0], np.cumsum(np.bincount(row[piece], minlength=seq_lens.size))])
    ranges = np.searchsorted(first // quota, np.arange(groups + 1))
    return Plan(items=items, ranges=ranges.astype(np.int32), parts=parts.astype(np.int32))


def plan_extend(context_lens: np.ndarray, query_lens: np.ndarray, *, heads: int, tile: int) -> np.ndarray:
    """Items (n, ITEM_FIELDS) of whole rows: one for each ``tile`` of a row's ``query_lens * heads`` queries, those with most to read first."""
    queries = query_lens.astype(np.int64) * heads
    counts = -(-queries // tile)
    row = np.repeat(np.arange(counts.size), counts)
    first = (np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
    last_token = (np.minimum(first + tile, queries[row]) - 1) // heads
    end = context_lens[row] + last_token + 1
    order = np.argsort(-end, kind="stable")
    items = np.zeros((row.size, ITEM_FIELDS), dtype=np.int32)
    items[:, 0], items[:, 1], items[:, 3], items[:, 4] = row[order], first[order], end[order], -1
    return items

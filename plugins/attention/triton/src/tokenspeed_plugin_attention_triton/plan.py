"""The decode plan, made on the host with numpy: which stretch of KV is read for which rows.

Rows of a shared-prefix interval read its pages in common; what remains of each row is its own stretch. Stretches are cut so that every processor has
work, in multiples of the kernel's KV block. Parts of a row are numbered in order of their positions, so results do not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["DecodePlan", "plan_decode"]

_START_COST = 1.5
_MERGE_COST = 2.0


@dataclass(frozen=True)
class DecodePlan:
    """Work of one step.

    Attributes:
        own: (n, 8) int32 items of single rows.
        shared: (n, 8) int32 items of several rows.
        parts: (rows) int32 parts of each row.
        part_table: (rows, most parts) int32, entry of the first query token of each part.
        entries: part entries used.
    """

    own: np.ndarray
    shared: np.ndarray
    parts: np.ndarray
    part_table: np.ndarray
    entries: int

    @property
    def split(self) -> bool:
        """Whether any row needs a merge."""
        return bool(self.parts.size) and int(self.parts.max()) > 1


def _stretches(
    begin: np.ndarray, end: np.ndarray, chunk: int, block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut [begin, end) into even pieces of at most ``chunk``, multiples of ``block``: (owner, piece number, piece begin, piece end), owners in order."""
    pieces = np.maximum(-(-(end - begin) // chunk), 1)
    even = -(-(end - begin) // pieces)
    size = -(-even // block) * block
    pieces = -(-(end - begin) // np.maximum(size, 1))
    owner = np.repeat(np.arange(begin.size), pieces)
    number = np.arange(owner.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = begin[owner] + number * size[owner]
    return owner, number, first, np.minimum(first + size[owner], end[owner])


def _piece_blocks(blocks: np.ndarray, kv_heads: int, programs: int) -> int:
    """Blocks of the longest piece, chosen so that the device is done first.

    Pieces are dealt out to ``programs`` in turn, one program a KV head. A piece costs its blocks and a start; a step with any stretch in pieces costs a
    merge. The costs are in units of the time a program takes for a block when all of them read.
    """
    longest = max(1, int(blocks.max(initial=1)))
    sizes = np.unique(-(-longest // np.arange(1, max(2, 2 * programs // kv_heads) + 1)))
    pieces = np.maximum(-(-blocks[:, None] // sizes[None, :]), 1)
    counts = pieces.sum(axis=0)
    mean = blocks.sum() / counts
    rounds = -(-counts * kv_heads // programs)
    cost = np.maximum(rounds * (mean + _START_COST), sizes + _START_COST) + np.where(sizes < longest, _MERGE_COST, 0.0)
    return int(sizes[int(np.argmin(cost))])


def plan_decode(
    seq_lens: np.ndarray,
    intervals: np.ndarray,
    *,
    width: int,
    group: int,
    kv_heads: int,
    page_size: int,
    programs: int,
    block: int,
    tile: int,
    max_entries: int,
    min_shared_tokens: int = 256,
) -> DecodePlan:
    """Make the items of one step.

    Args:
        seq_lens: (rows) tokens of each row, new ones counted.
        intervals: (n, 4) ``row_begin, row_end, first_page_index, pages``, nested, outer first; row numbers relative to the first decode row.
        width: query tokens of a row. group: query heads of a KV head.
        programs: persistent programs of the device.
        block: KV tokens a kernel step reads; pieces are multiples of it.
        tile: query vectors that a shared item may hold.
        max_entries: part entries that fit the workspace; pieces grow until they do.
        min_shared_tokens: shorter common stretches are not worth a pass of their own.
    """
    rows = seq_lens.size
    own_begin = np.zeros(rows, dtype=np.int64)
    rows_per_item = max(1, tile // (width * group))
    kept: list[tuple[int, int, int, int]] = []
    for row_begin, row_end, first, pages in intervals.tolist():
        begin, end = first * page_size, (first + pages) * page_size
        # A skipped outer interval leaves a gap that its inner ones cannot bridge: they are read as part of the row's own stretch.
        if row_end - row_begin < 2 or end - begin < min_shared_tokens or int(own_begin[row_begin]) != begin:
            continue
        kept.append((row_begin, row_end, begin, end))
        own_begin[row_begin:row_end] = end
    lengths = np.concatenate(
        [seq_lens - own_begin] + [np.full(-(-(b - a) // rows_per_item), end - begin) for a, b, begin, end in kept]
    )
    chunk = block * _piece_blocks(-(-lengths // block), kv_heads, programs)
    while True:
        plan = _build(seq_lens, own_begin, kept, width, rows_per_item, chunk, block)
        if plan.entries <= max_entries or chunk >= int(seq_lens.max(initial=1)):
            return plan
        chunk *= 2


def _build(
    seq_lens: np.ndarray,
    own_begin: np.ndarray,
    kept: list[tuple[int, int, int, int]],
    width: int,
    rows_per_item: int,
    chunk: int,
    block: int,
) -> DecodePlan:
    rows = seq_lens.size
    parts = np.zeros(rows, dtype=np.int32)
    shared: list[tuple[int, ...]] = []
    places: list[tuple[int, int, int, int]] = []  # row_begin, rows, part number, entry
    entry = 0
    for row_begin, row_end, begin, end in kept:
        pieces = max(1, round((end - begin) / chunk))
        cuts = begin + np.linspace(0, end - begin, pieces + 1).astype(np.int64) // block * block
        cuts[-1] = end
        for at in range(row_begin, row_end, rows_per_item):
            n = min(rows_per_item, row_end - at)
            for i in range(pieces):
                shared.append((at, at, n, int(cuts[i]), int(cuts[i + 1]), entry, 0, 0))
                places.append((at, n, int(parts[at]) + i, entry))
                entry += n * width
            parts[at : at + n] += pieces
    owner, number, first, last = _stretches(own_begin, seq_lens.astype(np.int64), chunk, block)
    own = np.zeros((owner.size, 8), dtype=np.int32)
    own[:, 0] = own[:, 1] = owner
    own[:, 2] = 1
    own[:, 3], own[:, 4] = first, last
    own[:, 5] = entry + np.arange(owner.size) * width
    own[:, 6] = 1
    before = parts.copy()
    parts += np.bincount(owner, minlength=rows).astype(np.int32)
    part_table = np.zeros((rows, max(1, int(parts.max(initial=1)))), dtype=np.int32)
    for at, n, part, base in places:
        part_table[at : at + n, part] = base + np.arange(n) * width
    part_table[owner, before[owner] + number] = own[:, 5]
    own = own[np.argsort(first - last, kind="stable")]  # longest first: what is dealt out last evens out the loads
    return DecodePlan(
        own=own,
        shared=np.array(shared, dtype=np.int32).reshape(-1, 8),
        parts=parts,
        part_table=part_table,
        entries=entry + owner.size * width,
    )

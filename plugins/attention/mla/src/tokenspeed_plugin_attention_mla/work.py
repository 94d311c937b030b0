"""Launchers: from tensors to the kernels. The step's plan lies in persistent device buffers, so that captured graphs can be replayed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl

from tokenspeed_plugin_attention_mla.attend import ITEM_FIELDS, attend_items, merge_parts
from tokenspeed_plugin_attention_mla.early import early_launch
from tokenspeed_plugin_attention_mla.plan import plan_decode, plan_extend

__all__ = [
    "TILES",
    "TILES_FP8",
    "TILES_ROCM",
    "LatentWork",
    "Staged",
    "Tiling",
    "processors_of",
    "tiles_of",
    "tiling_for",
]

_LOG2E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the kernel is built for a number of queries.

    Attributes:
        queries: BM of the kernel; ``latents`` is its BN.
        swap: transposed products.
        warps, stages: of a program; tiles that cross pages are fetched ``scattered`` stages ahead.
        residency: programs that share a multiprocessor.
    """

    queries: int
    latents: int
    swap: bool = False
    warps: int = 4
    stages: int = 3
    scattered: int = 5
    residency: int = 1


#: By queries of a row, ascending: registers and shared memory of sm_90 allow these (README).
TILES: tuple[Tiling, ...] = (
    Tiling(queries=16, latents=32, warps=4, stages=3, residency=2),
    Tiling(queries=32, latents=64, warps=8, stages=3),
    Tiling(queries=64, latents=64, warps=8, stages=2, scattered=3),
)

#: Latents of fp8 are widened in registers, which larger tiles have not got.
TILES_FP8: tuple[Tiling, ...] = (
    Tiling(queries=16, latents=32, warps=8, stages=3),
    Tiling(queries=32, latents=32, warps=8, stages=3),
)

#: CDNA 3 has 64 KiB of local memory.
TILES_ROCM: tuple[Tiling, ...] = (Tiling(queries=16, latents=16, warps=4, stages=1, scattered=1, residency=2),)


def tiling_for(queries: int, tiles: tuple[Tiling, ...] = TILES) -> Tiling:
    """The smallest tile that holds ``queries``, or the largest there is."""
    return next((tile for tile in tiles if tile.queries >= queries), tiles[-1])


class Staged:
    """An int32 tensor on the device that the host refills every step without waiting.

    Two host copies take turns: while a step runs on the device the next one may be staged, and the one after that only when the first has ended.
    """

    def __init__(self, *shape: int, device: torch.device) -> None:
        self.tensor = torch.zeros(shape, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)]
        self._turn = 0

    def send(self, data: np.ndarray) -> None:
        """Fill the leading rows of the tensor with ``data``."""
        self._turn ^= 1
        host = self._hosts[self._turn][: data.shape[0]]
        host.numpy()[...] = data
        self.tensor[: data.shape[0]].copy_(host, non_blocking=True)


class LatentWork:
    """Plans and launches attention over the latents of one cache group.

    Args:
        rank: elements of a latent that are its value; ``rope`` are the others.
        processors: multiprocessors of the device.
        max_queries: ``heads * tokens`` of all extend rows of a step, at most.
        tiles: tilings to choose from.
    """

    def __init__(
        self,
        *,
        heads: int,
        rank: int,
        rope: int,
        page_size: int,
        max_rows: int,
        max_queries: int,
        processors: int,
        device: torch.device,
        tiles: tuple[Tiling, ...] = TILES,
    ) -> None:
        self.heads, self.rank, self.rope, self.page_size, self.processors, self.tiles = (
            heads,
            rank,
            rope,
            page_size,
            processors,
            tiles,
        )
        programs = processors * max(tile.residency for tile in tiles)
        self._items = Staged(max_rows + programs, ITEM_FIELDS, device=device)
        self._ranges = Staged(programs + 1, device=device)
        self._parts = Staged(max_rows + 1, device=device)
        # Extend rows: an item a program, so the ranges are the numbers.
        self._tile = tiling_for(64, tiles)
        self._blocks = Staged(max_queries // self._tile.queries + max_rows + 1, ITEM_FIELDS, device=device)
        self._numbers = torch.arange(self._blocks.tensor.shape[0] + 1, dtype=torch.int32, device=device)
        self._block_count = 0
        # Parts of a step times the queries of each: twice the groups, and groups times query tiles are the programs.
        entries = max(2 * processors * tile.residency * tile.queries for tile in tiles)
        self._acc = torch.empty((entries, rank), dtype=torch.float32, device=device)
        self._max_sum = torch.empty((entries, 2), dtype=torch.float32, device=device)
        self.has_split = False

    def _shape(self, width: int) -> tuple[Tiling, int, int]:
        """(tiling, query tiles of a row, groups of programs) of rows of ``width`` tokens."""
        tiling = tiling_for(width * self.heads, self.tiles)
        tiles = -(-width * self.heads // tiling.queries)
        return tiling, tiles, max(1, self.processors * tiling.residency // tiles)

    def prepare(self, seq_lens: np.ndarray, width: int) -> None:
        """Plan the decode rows of a step and send the plan to the device without waiting."""
        tiling, _, groups = self._shape(width)
        plan = plan_decode(seq_lens, groups=groups, block=tiling.latents)
        self.has_split = plan.split
        self._items.send(plan.items)
        self._ranges.send(plan.ranges)
        self._parts.send(plan.parts)

    def prepare_extend(self, context_lens: np.ndarray, query_lens: np.ndarray) -> None:
        """Plan the extend rows of a step."""
        items = plan_extend(context_lens, query_lens, heads=self.heads, tile=self._tile.queries)
        self._block_count = items.shape[0]
        self._blocks.send(items)

    def decode(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        *,
        width: int,
        scale: float,
        kv_scale: float = 1.0,
    ) -> torch.Tensor:
        """Attention of the prepared rows: q (rows * width, heads, rank + rope) -> (rows * width, heads, rank).

        Args:
            latents: pages, (pages, page_size, 1, rank + rope) or (pages, 1, page_size, rank + rope).
            query_start: (rows + 1) first query token of each row within ``q``.
        """
        tiling, tiles, groups = self._shape(width)
        out = q.new_empty(q.shape[0], self.heads, self.rank)
        arguments = (q, latents, page_table, seq_lens, query_start)
        # Launched when what comes before has ended, as programs that begin early are dealt out unevenly; the merge may begin early.
        self._attend(
            arguments, self._items.tensor, self._ranges.tensor, out, tiling, tiles, groups, width, scale, kv_scale
        )
        if self.has_split:
            merge_parts[(width * self.heads, seq_lens.shape[0])](
                self._acc, self._max_sum, self._parts.tensor, out, kv_scale,
                QUERIES=width * self.heads, RANK=self.rank, BP=8, num_warps=4, **early_launch(q),
            )  # fmt: skip
        return out

    def extend(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        *,
        scale: float,
        kv_scale: float = 1.0,
    ) -> torch.Tensor:
        """The same for the prepared extend rows, of any number of tokens each."""
        out = q.new_empty(q.shape[0], self.heads, self.rank)
        arguments = (q, latents, page_table, seq_lens, query_start)
        self._attend(
            arguments, self._blocks.tensor, self._numbers, out, self._tile, 1, self._block_count, 1, scale, kv_scale
        )
        return out

    def _attend(
        self,
        arguments: tuple[torch.Tensor, ...],
        items: torch.Tensor,
        ranges: torch.Tensor,
        out: torch.Tensor,
        tiling: Tiling,
        tiles: int,
        groups: int,
        width: int,
        scale: float,
        kv_scale: float,
    ) -> None:
        q, latents, page_table, *_ = arguments
        wide = q.element_size() == 4
        fp8 = latents.element_size() == 1
        in_page = self.page_size % tiling.latents == 0
        stages = 1 if wide else tiling.stages if in_page else tiling.scattered
        compute = tl.float32 if wide else tl.float16 if fp8 or q.dtype is torch.float16 else tl.bfloat16
        attend_items[(tiles * groups,)](
            *arguments, items, ranges, out, self._acc, self._max_sum,
            self.heads, width * self.heads, page_table.stride(0), latents.stride(0), scale * kv_scale * _LOG2E, kv_scale,
            BLOCKS=tiles, RANK=self.rank, ROPE=self.rope, PAGE=self.page_size, BM=tiling.queries, BN=tiling.latents,
            STEP=self.rank + self.rope, SWAP=tiling.swap, IN_PAGE=in_page, COMPUTE=compute,
            num_warps=tiling.warps, num_stages=stages,
        )  # fmt: skip


def tiles_of(device: torch.device, kv_dtype: torch.dtype) -> tuple[Tiling, ...]:
    """The tilings for latents of ``kv_dtype`` on ``device``."""
    if device.type == "cuda" and torch.version.hip is not None:
        return TILES_ROCM
    return TILES_FP8 if kv_dtype.itemsize == 1 else TILES


def processors_of(device: torch.device) -> int:
    """Multiprocessors of ``device``; under the interpreter a few suffice."""
    if device.type != "cuda":
        return 3
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count

"""Launchers: from tensors to the kernels. The step's plan lies in persistent device buffers, so that captured graphs can be replayed."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from tokenspeed_plugin_attention_mla.attend import ITEM_FIELDS, attend_items, merge_parts
from tokenspeed_plugin_attention_mla.early import early_launch
from tokenspeed_plugin_attention_mla.hopper import HOPPER_TILES, HopperKernels, serves
from tokenspeed_plugin_attention_mla.plan import plan_decode, plan_extend
from tokenspeed_plugin_attention_mla.tiling import (
    TILES,
    TILES_FP8,
    TILES_FP32,
    TILES_ROCM,
    Tiling,
    tiling_for,
)

__all__ = ["LatentWork", "Staged", "processors_of", "tiles_of"]

_LOG2E = 1.4426950408889634


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
        self._hopper = HopperKernels() if any(tile.kernel != "portable" for tile in tiles) else None

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
        q, latents, page_table, seq_lens, query_start = arguments
        if self._hopper is not None:
            self._hopper.launch(
                tiling, tiles * groups, q, latents, page_table, seq_lens, query_start, items, ranges, out, self._acc, self._max_sum,
                self.heads, width * self.heads, page_size=self.page_size, tiles=tiles, scale=scale * kv_scale * _LOG2E, out_scale=kv_scale,
            )  # fmt: skip
            return
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


def tiles_of(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, *, rank: int, rope: int, page_size: int
) -> tuple[Tiling, ...]:
    """The tilings for queries of ``dtype`` and latents of ``kv_dtype`` on ``device``."""
    if device.type == "cuda" and torch.version.hip is not None:
        return TILES_ROCM
    if device.type == "cuda" and dtype.itemsize == 4:
        return TILES_FP32
    if serves(device, dtype, kv_dtype, rank=rank, rope=rope, page_size=page_size):
        return HOPPER_TILES
    return TILES_FP8 if kv_dtype.itemsize == 1 else TILES


def processors_of(device: torch.device) -> int:
    """Multiprocessors of ``device``; under the interpreter a few suffice."""
    if device.type != "cuda":
        return 3
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count

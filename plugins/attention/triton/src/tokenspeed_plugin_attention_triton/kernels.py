"""Launchers: from tensors to the Triton kernels. Hold the step's plan in persistent device buffers, so that captured graphs can be replayed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton

from tokenspeed_plugin_attention_triton.decode import ITEM_FIELDS, decode_items, merge_parts
from tokenspeed_plugin_attention_triton.early import early_launch
from tokenspeed_plugin_attention_triton.extend import extend_blocks
from tokenspeed_plugin_attention_triton.plan import DecodePlan, plan_decode

__all__ = ["DecodeWork", "Staged", "fitting_stages", "run_extend"]

#: Pieces are cut in multiples of this many KV tokens.
BLOCK_KV = 64
IN_PAGE = True
OWN_KV = 64
SHARED_KV = 64
OWN_TILE = 16
OWN_WARPS = 4
SHARED_TILE = 64
OWN_STAGES = 3
SHARED_STAGES = 2
EXTEND_KV = 64
EXTEND_STAGES = 3


def _strides(cache: torch.Tensor, layout: str) -> tuple[int, int, int]:
    return (
        (cache.stride(0), cache.stride(2), cache.stride(1))
        if layout == "HND"
        else (cache.stride(0), cache.stride(1), cache.stride(2))
    )


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program of the device may have, by which Triton refuses a launch; no bound where there is no device."""
    if device.type != "cuda":
        return 1 << 62
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def fitting_stages(wanted: int, *, tile: int, block: int, dim: int, v_dim: int, itemsize: int, limit: int) -> int:
    """Blocks of keys and values under way, at most ``wanted`` and at least one, so that they fit into shared memory beside the queries.

    Args:
        tile, block: query rows and KV tokens of a program; ``dim`` and ``v_dim`` are the head's, filled up to powers of two.
        itemsize: bytes of an element of the queries, which keys and values are widened to.
        limit: bytes of shared memory that a program may have.
    """
    left = limit - tile * dim * itemsize
    return max(1, min(wanted, left // (block * (dim + v_dim) * itemsize)))


class Staged:
    """An int32 tensor on the device that the host refills every step without waiting.

    Two host copies take turns: while a step runs on the device the next one may be staged, and the one after that only when the first has ended.
    """

    def __init__(self, *shape: int, device: torch.device) -> None:
        self.tensor = torch.zeros(shape, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)]
        self._turn = 0

    def send(self, data: np.ndarray) -> None:
        """Fill the leading part of the tensor with ``data`` (as many axes as the tensor; trailing axes may be narrower)."""
        self._turn ^= 1
        host = self._hosts[self._turn][: data.shape[0]]
        if data.ndim == 2 and data.shape[1] < host.shape[1]:
            host[:, : data.shape[1]].numpy()[...] = data
        else:
            host.numpy()[...] = data
        self.tensor[: data.shape[0]].copy_(host, non_blocking=True)


class DecodeWork:
    """Persistent buffers of the decode plan and its partial results for up to ``max_rows`` rows of ``width`` tokens.

    Args:
        programs: persistent programs to launch; twice the multiprocessors is right for a large GPU.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_width: int,
        q_heads: int,
        kv_heads: int,
        v_dim: int,
        page_size: int,
        device: torch.device,
        programs: int,
    ) -> None:
        self.q_heads, self.kv_heads, self.page_size, self.device, self.programs = (
            q_heads,
            kv_heads,
            page_size,
            device,
            programs,
        )
        self.max_entries = max_rows * max_width * 3 + 2 * programs * max_width * max(
            1, SHARED_TILE // (q_heads // kv_heads)
        )
        self.max_items = self.max_entries
        # A row has at most as many parts as make two rounds of work for every program, plus one a nested interval.
        self.max_parts = 2 * programs // kv_heads + 32
        self._own = Staged(self.max_items, ITEM_FIELDS, device=device)
        self._shared = Staged(self.max_items, ITEM_FIELDS, device=device)
        self._counts = Staged(2, device=device)
        self._parts = Staged(max_rows, device=device)
        self._part_table = Staged(max_rows, self.max_parts, device=device)
        self.acc = torch.empty((self.max_entries, q_heads, v_dim), dtype=torch.float32, device=device)
        self.max_sum = torch.empty((self.max_entries, q_heads, 2), dtype=torch.float32, device=device)
        self.has_shared = self.has_split = False

    def prepare(self, seq_lens: np.ndarray, intervals: np.ndarray, width: int) -> DecodePlan:
        """Plan a step and copy the plan to the device without synchronising."""
        plan = plan_decode(
            seq_lens,
            intervals,
            width=width,
            group=self.q_heads // self.kv_heads,
            kv_heads=self.kv_heads,
            page_size=self.page_size,
            programs=self.programs,
            block=BLOCK_KV,
            tile=SHARED_TILE,
            max_entries=self.max_entries,
        )
        self.has_shared, self.has_split = bool(plan.shared.size), plan.split
        self._own.send(plan.own)
        self._counts.send(np.array([plan.own.shape[0], plan.shared.shape[0]], dtype=np.int32))
        self._parts.send(plan.parts)
        if plan.shared.size:
            self._shared.send(plan.shared)
        if plan.split:
            self._part_table.send(plan.part_table)
        return plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        width: int,
        scale: float,
        layout: str,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the prepared rows: q (rows * width, q_heads, D) -> (rows * width, q_heads, Dv)."""
        tokens, heads, dim = q.shape
        v_dim = v.shape[-1]
        out = torch.empty((tokens, heads, v_dim), dtype=q.dtype, device=q.device)
        group = heads // self.kv_heads
        own_tile = max(OWN_TILE, triton.next_power_of_2(width * group))
        meta: dict[str, Any] = {
            "W": width, "G": group, "D": dim, "DV": v_dim, "PAGE": self.page_size,
            "BD": triton.next_power_of_2(dim), "BDV": triton.next_power_of_2(v_dim),
            "SOFTCAP": softcap > 0.0, "SINKS": sinks is not None, "WINDOW": window > 0,
        }  # fmt: skip
        sink = sinks if sinks is not None else self.max_sum
        # Launched only when what comes before has ended, unlike the other kernels: programs that begin early are dealt out unevenly, and the ones that walk
        # over the items would then share a processor by threes (346 instead of 280 us for 256 rows of 1,100 tokens on an H200).
        for items, index, tile, block, warps, stages in (
            (self._own, 0, own_tile, OWN_KV, OWN_WARPS, OWN_STAGES),
            (self._shared, 1, max(SHARED_TILE, own_tile), SHARED_KV, 4 if SHARED_TILE <= 64 else 8, SHARED_STAGES),
        ):
            if index == 1 and not self.has_shared:
                continue
            decode_items[(self.programs,)](
                q, k, v, page_table, seq_lens, items.tensor, self._counts.tensor[index:], self._parts.tensor, out, self.acc, self.max_sum, sink,
                heads, self.kv_heads, page_table.stride(0), *_strides(k, layout), *_strides(v, layout), scale, softcap, window,
                BM=tile, BN=block, IN_PAGE=IN_PAGE and self.page_size % block == 0, num_warps=warps, num_stages=_stages(stages, q, tile, block, meta), **meta,
            )  # fmt: skip
        if self.has_split:
            merge_parts[(tokens, heads)](
                self.acc, self.max_sum, self._parts.tensor, self._part_table.tensor, out, sink, heads, self.max_parts,
                W=width, DV=v_dim, BDV=meta["BDV"], BP=16, SINKS=sinks is not None, num_warps=4, **early_launch(q),
            )  # fmt: skip
        return out


def _stages(wanted: int, q: torch.Tensor, tile: int, block: int, dims: dict[str, Any]) -> int:
    """For queries of fp32, one stage."""
    if q.element_size() != 2:
        return 1
    limit = _shared_memory(q.device)
    return fitting_stages(wanted, tile=tile, block=block, dim=dims["BD"], v_dim=dims["BDV"], itemsize=2, limit=limit)


def run_extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    blocks: torch.Tensor,
    *,
    kv_heads: int,
    page_size: int,
    scale: float,
    layout: str,
    block_rows: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of chunks; ``blocks`` (n, 2) int32 lists (row, first query token) in steps of ``block_rows``."""
    tokens, heads, dim = q.shape
    v_dim = v.shape[-1]
    out = torch.empty((tokens, heads, v_dim), dtype=q.dtype, device=q.device)
    dims = {"BD": triton.next_power_of_2(dim), "BDV": triton.next_power_of_2(v_dim)}
    extend_blocks[(heads, blocks.shape[0])](
        q, k, v, page_table, seq_lens, query_start, blocks, out, sinks if sinks is not None else out,
        heads, page_table.stride(0), *_strides(k, layout), *_strides(v, layout), scale, softcap, window,
        G=heads // kv_heads, D=dim, DV=v_dim, PAGE=page_size, BM=block_rows, BN=EXTEND_KV,
        SOFTCAP=softcap > 0.0, SINKS=sinks is not None, WINDOW=window > 0, IN_PAGE=page_size % EXTEND_KV == 0,
        num_warps=4 if block_rows <= 64 else 8, num_stages=_stages(EXTEND_STAGES, q, block_rows, EXTEND_KV, dims), **dims,
    )  # fmt: skip
    return out

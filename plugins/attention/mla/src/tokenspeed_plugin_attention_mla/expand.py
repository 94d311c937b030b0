"""Prompts over expanded latents: when that costs less than absorbed queries, and the launches."""

from __future__ import annotations

import numpy as np
import torch
import triton

from tokenspeed.interfaces.attention import LatentUp
from tokenspeed_plugin_attention_mla.attend import ITEM_FIELDS
from tokenspeed_plugin_attention_mla.plan import plan_extend
from tokenspeed_plugin_attention_mla.ragged import attend_heads, gather_latents
from tokenspeed_plugin_attention_mla.tiling import HEADS, HEADS_FP32, HEADS_ROCM
from tokenspeed_plugin_attention_mla.work import Staged

__all__ = ["ExpandedPrefill", "worth_expanding"]

_LOG2E = 1.4426950408889634


def worth_expanding(
    context_lens: np.ndarray, query_lens: np.ndarray, *, rank: int, rope: int, nope: int, v_dim: int
) -> bool:
    """Whether the rows' attention over expanded latents takes fewer operations than over latents, the products before and after counted."""
    queries = query_lens.astype(np.float64)
    pairs = float((queries * (context_lens + (queries + 1) / 2)).sum())
    saved = pairs * (2 * rank + rope - nope - rope - v_dim) + float(queries.sum()) * rank * (nope + v_dim)
    return saved > float((context_lens + queries).sum()) * rank * (nope + v_dim)


class ExpandedPrefill:
    """Buffers and launches for the extend rows of a step.

    Args:
        workspace_bytes: memory for expanded keys and values; heads are done in turns where all at once need more.
        dtype: of the queries.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_tokens: int,
        workspace_bytes: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if device.type != "cuda":
            self._tile, self._keys, self._warps = 16, 16, 4
        elif dtype.itemsize == 4:
            self._tile, self._keys, self._warps = HEADS_FP32
        else:
            self._tile, self._keys, self._warps = HEADS_ROCM if torch.version.hip is not None else HEADS
        self._workspace = workspace_bytes
        self._items = Staged(max_tokens // self._tile + max_rows + 1, ITEM_FIELDS, device=device)
        self._kv_start = Staged(max_rows + 1, device=device)
        self._count = self._rows = self._total = self._longest = 0

    def prepare(self, context_lens: np.ndarray, query_lens: np.ndarray) -> None:
        """Plan the extend rows of a step."""
        lengths = context_lens + query_lens
        items = plan_extend(context_lens, query_lens, heads=1, tile=self._tile)
        self._count, self._rows, self._total, self._longest = (
            items.shape[0],
            lengths.size,
            int(lengths.sum()),
            int(lengths.max()),
        )
        self._items.send(items)
        self._kv_start.send(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))

    def run(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        page_table: torch.Tensor,
        query_start: torch.Tensor,
        up: LatentUp,
        *,
        scale: float,
        kv_scale: float = 1.0,
    ) -> torch.Tensor:
        """Attention of the prepared rows: q (tokens, heads, nope + rope) -> (tokens, heads, v_dim); ``latents`` as ``LatentWork.decode`` takes them."""
        heads, nope, rank = up.keys.shape
        v_dim, dim = up.values.shape[1], latents.shape[-1]
        page_size = latents.shape[1] * latents.shape[2]  # one of them is the head
        gathered = q.new_empty(self._total, dim)
        block = 16
        gather_latents[(triton.cdiv(self._longest, block), self._rows)](
            latents, page_table, self._kv_start.tensor, gathered, page_table.stride(0), latents.stride(0), page_size, kv_scale,
            DIM=dim, BD=triton.next_power_of_2(dim), BT=block, SCALED=kv_scale != 1.0, num_warps=4,
        )  # fmt: skip
        out = q.new_empty(q.shape[0], heads, v_dim)
        each = max(1, min(heads, self._workspace // (self._total * (nope + v_dim) * q.element_size())))
        for head in range(0, heads, each):
            taken = slice(head, min(heads, head + each))
            keys = gathered[:, :rank] @ up.keys[taken].flatten(0, 1).t()
            values = gathered[:, :rank] @ up.values[taken].flatten(0, 1).t()
            attend_heads[(taken.stop - head, self._count)](
                q[:, taken], keys, gathered[:, rank:], values, query_start, self._kv_start.tensor, self._items.tensor, out[:, taken],
                q.stride(0), keys.stride(0), dim, values.stride(0), out.stride(0), scale * _LOG2E,
                NOPE=nope, ROPE=dim - rank, DV=v_dim, BM=self._tile, BN=self._keys,
                num_warps=self._warps, num_stages=1 if q.element_size() == 4 else 3,
            )  # fmt: skip
        return out

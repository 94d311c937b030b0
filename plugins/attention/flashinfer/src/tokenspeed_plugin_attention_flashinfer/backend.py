"""The backend: one wrapper for prefill, one for decode; planned once a step, run once a layer."""

from __future__ import annotations

from typing import Any

import flashinfer
import numpy as np
import torch

from tokenspeed.errors import PluginError
from tokenspeed.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, LayerKV
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.types import KVLayout
from tokenspeed_plugin_attention_flashinfer.pages import page_list, token_list

__all__ = ["FlashInferBackend"]

#: Up to this many KV tokens a query token, copying a layer's KV into one piece costs less than the kernel gains: 660 TFLOP/s instead of 550 on an H200.
_GATHER_LIMIT = 32


def _starts(lengths: np.ndarray) -> np.ndarray:
    """First entries of stretches of ``lengths``, and the end: int32."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class FlashInferBackend(AttentionBackend):
    """Paged attention by FlashInfer. All layers of the group share scale and softcap; decode rows have one query token.

    Raises:
        PluginError: a decode width above 1 is asked for.
    """

    def __init__(self, ctx: AttentionContext) -> None:
        super().__init__(ctx)
        if ctx.max_width > 1:
            raise PluginError(
                "attention backend flashinfer decodes one token a row; use --decode-attention-backend triton"
            )
        workspace = torch.empty(int(ctx.options.get("workspace_mb", 256)) * 2**20, dtype=torch.uint8, device=ctx.device)
        layout = ctx.layout.value
        # Two take turns: a wrapper's pinned plan may be overwritten only when the step before last has ended.
        self._prefills = [flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout) for _ in range(2)]
        self._prefill = self._prefills[0]
        self._raggeds = [flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD") for _ in range(2)]
        self._ragged = self._raggeds[0]
        self._gathered: torch.Tensor | None = None
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=True)
        self._shape = {
            "num_qo_heads": ctx.q_heads,
            "num_kv_heads": ctx.group.kv_heads,
            "page_size": ctx.page_size,
            "q_data_type": ctx.dtype,
            "kv_data_type": ctx.kv_dtype,
        }
        self._planned: dict[str, tuple[Any, ...] | None] = {"prefill": None, "decode": None}
        self._batch: ForwardBatch | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Forget the last step's plan; the next is made when the first layer tells its scale."""
        if batch.num_extend_rows:
            self._prefills.reverse()
            self._raggeds.reverse()
            self._prefill, self._ragged = self._prefills[0], self._raggeds[0]
        self._batch = batch
        self._planned = {"prefill": None, "decode": None}

    def _pages(self, batch: ForwardBatch, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        table = batch.page_tables[self.ctx.group_index]
        pages = page_list(batch.host.seq_lens[first:last], self.ctx.page_size, table.stride(0), first)
        flat = table.as_strided((table.stride(0) * (batch.num_rows - 1) + table.shape[1],), (1,))
        gather = torch.from_numpy(pages.gather).pin_memory().to(table.device, non_blocking=True)
        return torch.from_numpy(pages.indptr), flat.index_select(0, gather), torch.from_numpy(pages.last)

    def _plan_prefill(self, layer: AttentionLayer, batch: ForwardBatch) -> None:
        key = (layer.scale, layer.softcap, layer.window)
        if self._planned["prefill"] == key:
            return
        extends = batch.num_extend_rows
        common = {
            "head_dim_vo": self.ctx.group.v_head_dim,
            "causal": True,
            "sm_scale": layer.scale,
            "logits_soft_cap": layer.softcap or None,
            "window_left": layer.window - 1 if layer.window else -1,
        }
        start = _starts(batch.host.query_lens[:extends])
        lengths = batch.host.seq_lens[:extends]
        if int(lengths.sum()) <= _GATHER_LIMIT * int(start[-1]):
            self._gathered = self._token_index(batch, lengths)
            shape = {name: value for name, value in self._shape.items() if name != "page_size"}
            self._ragged.plan(
                torch.from_numpy(start),
                torch.from_numpy(_starts(lengths)),
                head_dim_qk=self.ctx.group.head_dim,
                **common,
                **shape,
            )
        else:
            self._gathered = None
            indptr, indices, last = self._pages(batch, 0, extends)
            self._prefill.plan(
                torch.from_numpy(start),
                indptr,
                indices,
                last,
                head_dim_qk=self.ctx.group.head_dim,
                **common,
                **self._shape,
            )
        self._planned["prefill"] = key

    def _token_index(self, batch: ForwardBatch, lengths: np.ndarray) -> torch.Tensor:
        """Where each head of each token of the extend rows lies: (heads, tokens) int64 into the pages seen as rows of one head (HND), or (1, tokens) into
        them seen as rows of all heads (NHD)."""
        page_size, heads = self.ctx.page_size, self.ctx.group.kv_heads
        table = batch.page_tables[self.ctx.group_index]
        tokens = token_list(lengths, page_size, table.stride(0))
        device = torch.from_numpy(tokens).pin_memory().to(table.device, non_blocking=True)
        flat = table.as_strided((table.stride(0) * (batch.num_rows - 1) + table.shape[1],), (1,))
        page = flat.index_select(0, device[0]).to(torch.int64)
        if self.ctx.layout is KVLayout.NHD:
            return (page * page_size + device[1])[None]
        head = torch.arange(heads, device=table.device)[:, None]
        return (page[None] * heads + head) * page_size + device[1]

    def _gather(self, cache: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The tokens of ``index`` of one layer's keys or values: (tokens, heads, dim), any strides but the last."""
        dim = cache.shape[-1]
        if self.ctx.layout is KVLayout.NHD:
            heads = cache.shape[2]
            return cache.view(-1, heads * dim).index_select(0, index[0]).view(-1, heads, dim)
        return cache.view(-1, dim).index_select(0, index.view(-1)).view(*index.shape, dim).transpose(0, 1)

    def _plan_decode(self, layer: AttentionLayer, batch: ForwardBatch) -> None:
        key = (layer.scale, layer.softcap, layer.window)
        if self._planned["decode"] == key:
            return
        indptr, indices, last = self._pages(batch, batch.num_extend_rows, batch.num_rows)
        self._decode.plan(
            indptr,
            indices,
            last,
            head_dim=self.ctx.group.head_dim,
            sm_scale=layer.scale,
            logits_soft_cap=layer.softcap or None,
            window_left=layer.window - 1 if layer.window else -1,
            **self._shape,
        )
        self._planned["decode"] = key

    def forward_extend(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """See ``AttentionBackend``."""
        self._plan_prefill(layer, batch)
        out: torch.Tensor
        if self._gathered is None:
            out = self._prefill.run(q, (kv.k, kv.v))
        else:
            out = self._ragged.run(q, self._gather(kv.k, self._gathered), self._gather(kv.v, self._gathered))
        return out

    def forward_decode(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """See ``AttentionBackend``."""
        self._plan_decode(layer, batch)
        out: torch.Tensor = self._decode.run(q, (kv.k, kv.v))
        return out

"""The backend: one wrapper for prefill, one for decode; planned once a step, run once a layer."""

from __future__ import annotations

from typing import Any

import flashinfer
import numpy as np
import torch

from tokenspeed.errors import PluginError
from tokenspeed.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, LayerKV
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed_plugin_attention_flashinfer.pages import page_list

__all__ = ["FlashInferBackend"]


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
            self._prefill = self._prefills[0]
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
        indptr, indices, last = self._pages(batch, 0, extends)
        start = np.zeros(extends + 1, dtype=np.int32)
        np.cumsum(batch.host.query_lens[:extends], out=start[1:])
        self._prefill.plan(
            torch.from_numpy(start),
            indptr,
            indices,
            last,
            head_dim_qk=self.ctx.group.head_dim,
            head_dim_vo=self.ctx.group.v_head_dim,
            causal=True,
            sm_scale=layer.scale,
            logits_soft_cap=layer.softcap or None,
            window_left=layer.window - 1 if layer.window else -1,
            **self._shape,
        )
        self._planned["prefill"] = key

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
        out: torch.Tensor = self._prefill.run(q, (kv.k, kv.v))
        return out

    def forward_decode(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """See ``AttentionBackend``."""
        self._plan_decode(layer, batch)
        out: torch.Tensor = self._decode.run(q, (kv.k, kv.v))
        return out

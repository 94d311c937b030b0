"""Attention with keys and values of heads: wrappers for prompts and decodes, planned once a step, run once a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tokenspeed.errors import PluginError
from tokenspeed.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, LayerKV
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.types import KVLayout
from tokenspeed_plugin_attention_flashinfer.pages import page_list, starts, token_list
from tokenspeed_plugin_attention_flashinfer.wrappers import Turns, library, upload

__all__ = ["FlashInferBackend"]

#: Up to this many KV tokens a query token, copying a layer's KV into one piece costs less than the kernel gains: 660 TFLOP/s instead of 550 on an H200.
_GATHER_LIMIT = 32


class FlashInferBackend(AttentionBackend):
    """Paged attention by FlashInfer; its decode is not captured, since its plans depend on the lengths of the rows."""

    def __init__(self, ctx: AttentionContext) -> None:
        super().__init__(ctx)
        flashinfer, layout = library(), ctx.layout.value
        workspace = torch.empty(int(ctx.options.get("workspace_mb", 256)) * 2**20, dtype=torch.uint8, device=ctx.device)
        self._prefill = Turns(lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout))
        self._ragged = Turns(lambda: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD"))
        self._wide = Turns(lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout))
        self._decode = Turns(
            lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=True)
        )
        self._heads = {
            "num_qo_heads": ctx.q_heads,
            "num_kv_heads": ctx.group.kv_heads,
            "q_data_type": ctx.dtype,
            "kv_data_type": ctx.kv_dtype,
        }
        # Of the step: tokens of the extend rows and where their queries begin, and whether their keys and values are read in their pages.
        self._lengths, self._start, self._in_pages = np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int32), False
        self._gathered: torch.Tensor | None = None
        self._listed: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def bind_layers(self, layers: Sequence[AttentionLayer]) -> None:
        """Refuse what the kernels do not compute."""
        for layer in layers:
            if layer.sinks is not None:
                raise PluginError(
                    f"attention backend flashinfer has no sinks, which layer {layer.index} needs; use --attention-backend triton"
                )

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Forget the last step's plans; the next are made when the first layer tells its scale."""
        for wrappers in (self._prefill, self._ragged, self._wide, self._decode):
            wrappers.next_step()
        self._gathered = None
        self._listed.clear()
        extends = batch.num_extend_rows
        self._lengths, self._start = batch.host.seq_lens[:extends], starts(batch.host.query_lens[:extends])
        self._in_pages = int(self._lengths.sum()) > _GATHER_LIMIT * int(self._start[-1])

    def _constants(self, layer: AttentionLayer) -> dict[str, Any]:
        return {
            "sm_scale": layer.scale,
            "logits_soft_cap": layer.softcap or None,
            "window_left": layer.window - 1 if layer.window else -1,
        }

    def _pages(self, batch: ForwardBatch, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of rows [first, last): starts of their page lists (host), the lists (device), tokens on their last pages (host)."""
        if (first, last) not in self._listed:
            table = batch.page_tables[self.ctx.group_index]
            pages = page_list(batch.host.seq_lens[first:last], self.ctx.page_size, table.stride(0), first)
            gather = upload(torch.from_numpy(pages.gather), table.device)
            listed = _flat(table, batch.num_rows).index_select(0, gather)
            self._listed[first, last] = torch.from_numpy(pages.indptr), listed, torch.from_numpy(pages.last)
        return self._listed[first, last]

    def _token_index(self, batch: ForwardBatch, lengths: np.ndarray) -> torch.Tensor:
        """Where each head of each token of the extend rows lies: (heads, tokens) int64 into the pages seen as rows of one head (HND), or (1, tokens) into
        them seen as rows of all heads (NHD)."""
        page_size, heads = self.ctx.page_size, self.ctx.group.kv_heads
        table = batch.page_tables[self.ctx.group_index]
        tokens = upload(torch.from_numpy(token_list(lengths, page_size, table.stride(0))), table.device)
        page = _flat(table, batch.num_rows).index_select(0, tokens[0]).to(torch.int64)
        if self.ctx.layout is KVLayout.NHD:
            return (page * page_size + tokens[1])[None]
        head = torch.arange(heads, device=table.device)[:, None]
        return (page[None] * heads + head) * page_size + tokens[1]

    def _gather(self, cache: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The tokens of ``index`` of one layer's keys or values: (tokens, heads, dim), any strides but the last."""
        dim = cache.shape[-1]
        if self.ctx.layout is KVLayout.NHD:
            heads = cache.shape[2]
            return cache.view(-1, heads * dim).index_select(0, index[0]).view(-1, heads, dim)
        return cache.view(-1, dim).index_select(0, index.view(-1)).view(*index.shape, dim).transpose(0, 1)

    def forward_extend(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """See ``AttentionBackend``."""
        constants = self._constants(layer)
        key = tuple(constants.values())
        out: torch.Tensor
        if self._in_pages:
            pages = self._pages(batch, 0, batch.num_extend_rows)
            wrapper = self._prefill.planned(key, lambda w: self._plan_paged(w, self._start, pages, constants))
            out = wrapper.run(q, (kv.k, kv.v))
            return out
        if self._gathered is None:
            self._gathered = self._token_index(batch, self._lengths)
        wrapper = self._ragged.planned(
            key,
            lambda w: w.plan(
                torch.from_numpy(self._start),
                torch.from_numpy(starts(self._lengths)),
                head_dim_qk=self.ctx.group.head_dim,
                head_dim_vo=self.ctx.group.v_head_dim,
                causal=True,
                **constants,
                **self._heads,
            ),
        )
        out = wrapper.run(q, self._gather(kv.k, self._gathered), self._gather(kv.v, self._gathered))
        return out

    def forward_decode(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """See ``AttentionBackend``. Rows of several tokens are read as prompts with little to compute."""
        width, first = batch.decode_width, batch.num_extend_rows
        pages, constants = self._pages(batch, first, batch.num_rows), self._constants(layer)
        key = tuple(constants.values())
        if width > 1:
            start = np.arange(batch.num_rows - first + 1, dtype=np.int32) * np.int32(width)
            wrapper = self._wide.planned(key, lambda w: self._plan_paged(w, start, pages, constants))
        else:
            wrapper = self._decode.planned(
                key,
                lambda w: w.plan(
                    *pages,
                    head_dim=self.ctx.group.head_dim,
                    page_size=self.ctx.page_size,
                    **constants,
                    **self._heads,
                ),
            )
        out: torch.Tensor = wrapper.run(q, (kv.k, kv.v))
        return out

    def _plan_paged(
        self,
        wrapper: Any,
        start: np.ndarray,
        pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        constants: dict[str, Any],
    ) -> None:
        wrapper.plan(
            torch.from_numpy(start),
            *pages,
            head_dim_qk=self.ctx.group.head_dim,
            head_dim_vo=self.ctx.group.v_head_dim,
            page_size=self.ctx.page_size,
            causal=True,
            **constants,
            **self._heads,
        )


def _flat(table: torch.Tensor, rows: int) -> torch.Tensor:
    """The entries of ``rows`` rows of a page table as one axis; rows stay ``table.stride(0)`` apart."""
    return table.as_strided((table.stride(0) * (rows - 1) + table.shape[1],), (1,))

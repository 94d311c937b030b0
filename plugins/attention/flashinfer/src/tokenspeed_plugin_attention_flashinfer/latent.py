"""Attention over latents (MLA): FlashInfer's wrapper reads both parts of a latent where they lie, as views of one tensor with any strides but the last.

For a captured decode nothing that the kernel is launched with may change: the wrapper's plan has one size and place whatever the rows are, and page lists are
whole rows of the page table, copied into a buffer inside the graph. What a plan holds is sent before each replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tokenspeed.errors import PluginError
from tokenspeed.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, LayerKV
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.types import KVLayout
from tokenspeed_plugin_attention_flashinfer.pages import starts
from tokenspeed_plugin_attention_flashinfer.wrappers import library

__all__ = ["FlashInferLatentBackend"]

_RANK, _ROPE = 512, 64

#: The kernel reads tiles of 128 queries (tokens by heads), of which its plan holds so many; a few more for what it cuts up along the context.
_TILE, _WORKS, _FURTHER = 128, 16384, 512

#: The kernel computes places within a layer's pages in 32 bits.
_ELEMENTS = 2**32


class _Planned:
    """One wrapper, planned once a step; the constant that its plan was made with."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.scale: float | None = None
        self._sent: torch.cuda.Event | None = None

    def plan(self, device: torch.device, scale: float, *arguments: Any, **named: Any) -> None:
        """Plan. The pinned buffer that this fills was copied by the last step before anything else it did, so the wait is over once the step before that has
        ended."""
        if self._sent is not None:
            self._sent.synchronize()
        self.wrapper.plan(*arguments, sm_scale=scale, **named)
        if device.type == "cuda":
            self._sent = self._sent or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record(torch.cuda.current_stream(device))
        self.scale = scale


class FlashInferLatentBackend(AttentionBackend):
    """Multi-head latent attention by FlashInfer, for absorbed queries; prompts are absorbed too.

    Raises:
        PluginError: the cache group is not of latents of 512 + 64 elements, the number of query heads does not divide 128, or a step may have more queries
            than the kernel's plan holds.
    """

    def __init__(self, ctx: AttentionContext) -> None:
        super().__init__(ctx)
        group, heads = ctx.group, ctx.q_heads
        rank, rope = group.v_head_dim, group.head_dim - group.v_head_dim
        if group.kind != "mla" or (rank, rope) != (_RANK, _ROPE):
            raise PluginError(
                f"attention backend flashinfer-mla serves latents of {_RANK} + {_ROPE} elements, not a group of kind {group.kind} with {rank} + {rope}; "
                "use --attention-backend mla"
            )
        if _TILE % heads:
            raise PluginError(
                f"attention backend flashinfer-mla takes a number of query heads that divides {_TILE}, not {heads}; use --attention-backend mla"
            )
        room = (_WORKS - _FURTHER - 2 * ctx.max_rows) * _TILE // heads
        if ctx.max_tokens > room:
            raise PluginError(
                f"attention backend flashinfer-mla takes steps of at most {room} tokens of {heads} heads, not {ctx.max_tokens}; lower --chunked-prefill-size"
            )
        wrapper = library().mla.BatchMLAPagedAttentionWrapper
        workspace = torch.empty(int(ctx.options.get("workspace_mb", 256)) * 2**20, dtype=torch.uint8, device=ctx.device)
        self._phases = {phase: _Planned(wrapper(workspace, backend="auto")) for phase in ("extend", "decode")}
        self._columns = -(-ctx.max_model_len // ctx.page_size) + 1
        self._tables = torch.zeros(ctx.max_rows * self._columns, dtype=torch.int32, device=ctx.device)
        self._copied: torch.Tensor | None = None
        self._scale: float | None = None

    def bind_layers(self, layers: Sequence[AttentionLayer]) -> None:
        """Refuse what the kernel does not compute, and layers that cannot share a plan."""
        for layer in layers:
            if layer.window or layer.softcap or layer.sinks is not None:
                raise PluginError(
                    f"attention backend flashinfer-mla has no window, softcap or sinks, which layer {layer.index} needs; use --attention-backend torch"
                )
        scales = {layer.scale * layer.kv_scale for layer in layers}
        if len(scales) > 1:
            raise PluginError(
                "attention backend flashinfer-mla plans once a step for all layers, and these have several scales; use --attention-backend mla"
            )
        self._scale = scales.pop() if scales else None

    def bind_pages(self, pages: Sequence[LayerKV]) -> None:
        """Refuse a pool with pages that the kernel cannot address."""
        for kv in pages:
            latents = self._latents(kv)
            if (elements := latents.shape[0] * latents.stride(0)) > _ELEMENTS:
                raise PluginError(
                    f"attention backend flashinfer-mla reads at most {_ELEMENTS} elements of a layer's pages, and these are {elements}; "
                    "lower --max-total-tokens, or use --attention-backend mla"
                )

    def _latents(self, kv: LayerKV) -> torch.Tensor:
        """(pages, page_size, rank + rope)"""
        return kv.k[:, :, 0] if self.ctx.layout is KVLayout.NHD else kv.k[:, 0]

    @property
    def graph_variants(self) -> tuple[int, ...]:
        """0: one launch serves all lengths."""
        return (0,)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan the step, or where no layers were bound leave that to the first layer."""
        self._copied = None
        for phase, planned in self._phases.items():
            planned.scale = None
            if self._scale is not None and _rows(phase, batch)[1] > _rows(phase, batch)[0]:
                self._plan(phase, self._scale, batch)

    def _plan(self, phase: str, scale: float, batch: ForwardBatch) -> None:
        first, last = _rows(phase, batch)
        counts, lengths = batch.host.query_lens[first:last], batch.host.seq_lens[first:last]
        lists = np.arange(first, last + 1, dtype=np.int32) * np.int32(self._columns)
        self._phases[phase].plan(
            self.ctx.device,
            scale,
            qo_indptr=torch.from_numpy(starts(counts)),
            kv_indptr=torch.from_numpy(lists),
            kv_indices=self._tables,
            kv_len_arr=torch.from_numpy(lengths.astype(np.int32)),
            num_heads=self.ctx.q_heads,
            head_dim_ckv=_RANK,
            head_dim_kpe=_ROPE,
            page_size=self.ctx.page_size,
            causal=bool((counts > 1).any()),
            q_data_type=self.ctx.dtype,
            kv_data_type=self.ctx.kv_dtype,
        )

    def forward_extend(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """See ``AttentionBackend``."""
        return self._run("extend", q, kv, layer, batch)

    def forward_decode(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """See ``AttentionBackend``."""
        return self._run("decode", q, kv, layer, batch)

    def _run(
        self, phase: str, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        latents = self._latents(kv)
        table = batch.page_tables[self.ctx.group_index]
        if table is not self._copied:
            columns = min(self._columns, table.shape[1])
            self._tables.view(-1, self._columns)[: batch.num_rows, :columns].copy_(table[: batch.num_rows, :columns])
            self._copied = table
        planned = self._phases[phase]
        scale = layer.scale * layer.kv_scale
        if planned.scale != scale:
            self._plan(phase, scale, batch)
        out = torch.empty((*q.shape[:2], _RANK), dtype=q.dtype, device=q.device)
        planned.wrapper.run(q[..., :_RANK], q[..., _RANK:], latents[..., :_RANK], latents[..., _RANK:], out=out)
        return out if layer.kv_scale == 1.0 else out.mul_(layer.kv_scale)


def _rows(phase: str, batch: ForwardBatch) -> tuple[int, int]:
    """First row of a phase, and the end."""
    return (0, batch.num_extend_rows) if phase == "extend" else (batch.num_extend_rows, batch.num_rows)

"""Attention backend ``torch``: the reference kernels over whatever pages there are. The definition other backends are compared with.

Latents (``mla``) are one KV head whose values are the first part of its keys; their scale is that of the scores and of what comes out.
"""

from __future__ import annotations

import torch

from tokenspeed.builtin.kernels import attention as reference
from tokenspeed.interfaces.attention import AttentionBackend, AttentionLayer, LayerKV
from tokenspeed.interfaces.batch import ForwardBatch

__all__ = ["TorchAttention"]


class TorchAttention(AttentionBackend):
    """Row by row, in fp32; any head size, page size, layout and element type."""

    def forward_extend(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        rows = batch.num_extend_rows
        table = batch.page_tables[self.ctx.group_index][:rows]
        starts = batch.query_start[: rows + 1]
        out = reference.extend(
            q,
            kv.k,
            kv.v,
            table,
            batch.seq_lens[:rows],
            starts,
            layer.scale * layer.kv_scale,
            self.ctx.layout.value,
            layer.window,
            layer.softcap,
            layer.sinks,
        )
        return out if layer.kv_scale == 1.0 else out * layer.kv_scale

    def forward_decode(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        rows = slice(batch.num_extend_rows, batch.num_rows)
        table = batch.page_tables[self.ctx.group_index][rows]
        out = reference.decode(
            q,
            kv.k,
            kv.v,
            table,
            batch.seq_lens[rows],
            batch.decode_width,
            layer.scale * layer.kv_scale,
            self.ctx.layout.value,
            layer.window,
            layer.softcap,
            layer.sinks,
        )
        return out if layer.kv_scale == 1.0 else out * layer.kv_scale

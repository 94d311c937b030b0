"""Attention backend ``torch``: the reference kernels over whatever pages there are. The definition other backends are compared with."""

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
        return reference.extend(
            q,
            kv.k,
            kv.v,
            table,
            batch.seq_lens[:rows],
            starts,
            layer.scale,
            self.ctx.layout.value,
            layer.window,
            layer.softcap,
            layer.sinks,
        )

    def forward_decode(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        rows = slice(batch.num_extend_rows, batch.num_rows)
        table = batch.page_tables[self.ctx.group_index][rows]
        return reference.decode(
            q,
            kv.k,
            kv.v,
            table,
            batch.seq_lens[rows],
            batch.decode_width,
            layer.scale,
            self.ctx.layout.value,
            layer.window,
            layer.softcap,
            layer.sinks,
        )

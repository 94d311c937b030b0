"""The backend: plans a step once, launches per layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed.errors import PluginError
from tokenspeed.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, LayerKV
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed_plugin_attention_mla.expand import ExpandedPrefill, worth_expanding
from tokenspeed_plugin_attention_mla.work import LatentWork, processors_of, tiles_of

__all__ = ["MlaBackend"]


def _tiled(size: int) -> bool:
    """Whether an axis of ``size`` elements is a tile of the kernels: a power of two from 16 on."""
    return size >= 16 and size & (size - 1) == 0


class MlaBackend(AttentionBackend):
    """Split-KV decode and prefill over paged latents, for absorbed queries.

    Raises:
        PluginError: the cache group is not of latents, or the sizes of its two parts are no powers of two from 16 on.
    """

    def __init__(self, ctx: AttentionContext) -> None:
        super().__init__(ctx)
        group = ctx.group
        rank, rope = group.v_head_dim, group.head_dim - group.v_head_dim
        if group.kind != "mla":
            raise PluginError(
                f"attention backend mla serves cache groups of kind mla, not {group.kind}; use --attention-backend triton"
            )
        if not all(_tiled(size) for size in (rank, rope)):
            raise PluginError(
                f"attention backend mla takes latents of a power of two of elements and another of rotated ones, from 16 on, not {rank} and {rope}; "
                "use --attention-backend torch"
            )
        self._expanded = ExpandedPrefill(
            max_rows=ctx.max_rows,
            max_tokens=ctx.max_tokens,
            workspace_bytes=int(ctx.options.get("workspace_mb", 1024)) * 2**20,
            device=ctx.device,
            dtype=ctx.dtype,
        )
        self._work = LatentWork(
            heads=ctx.q_heads,
            rank=rank,
            rope=rope,
            page_size=ctx.page_size,
            max_rows=ctx.max_rows,
            max_queries=ctx.max_tokens * ctx.q_heads,
            processors=processors_of(ctx.device),
            device=ctx.device,
            tiles=tiles_of(ctx.device, ctx.dtype, ctx.kv_dtype, rank=rank, rope=rope, page_size=ctx.page_size),
        )

    def bind_layers(self, layers: Sequence[AttentionLayer]) -> None:
        """Refuse what the kernels do not compute."""
        for layer in layers:
            if layer.window or layer.softcap or layer.sinks is not None:
                raise PluginError(
                    f"attention backend mla has no window, softcap or sinks, which layer {layer.index} needs; use --attention-backend torch"
                )

    @property
    def graph_variants(self) -> tuple[int, ...]:
        """0: every row in one piece; 1: pieces and their merge."""
        return (0, 1)

    @property
    def graph_variant(self) -> int:
        """What the prepared step needs."""
        return int(self._work.has_split)

    def init_capture_metadata(self, batch: ForwardBatch, variant: int) -> None:
        """Plan rows of one token, then launch as ``variant`` does."""
        self.init_forward_metadata(batch)
        self._work.has_split = bool(variant)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Deal out the rows."""
        host, extends = batch.host, batch.num_extend_rows
        if extends:
            self._work.prepare_extend(host.context_lens[:extends], host.query_lens[:extends])
            self._expanded.prepare(host.context_lens[:extends], host.query_lens[:extends])
        if batch.num_rows > extends:
            self._work.prepare(host.seq_lens[extends:], batch.decode_width)

    def forward_extend(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """See ``AttentionBackend``."""
        rows = batch.num_extend_rows
        return self._work.extend(
            q,
            kv.k,
            batch.page_tables[self.ctx.group_index][:rows],
            batch.seq_lens[:rows],
            batch.query_start[: rows + 1],
            scale=layer.scale,
            kv_scale=layer.kv_scale,
        )

    def forward_extend_heads(
        self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Expands the latents where that takes fewer operations than absorbing the queries."""
        up, group, rows, host = layer.latent, self.ctx.group, batch.num_extend_rows, batch.host
        assert up is not None, "layers of latents bring their projections"
        rank, nope, v_dim = group.v_head_dim, up.keys.shape[1], up.values.shape[1]
        if not all(_tiled(size) for size in (nope, v_dim)) or not worth_expanding(
            host.context_lens[:rows],
            host.query_lens[:rows],
            rank=rank,
            rope=group.head_dim - rank,
            nope=nope,
            v_dim=v_dim,
        ):
            return super().forward_extend_heads(q, kv, layer, batch)
        return self._expanded.run(
            q,
            kv.k,
            batch.page_tables[self.ctx.group_index][:rows],
            batch.query_start[: rows + 1],
            up,
            scale=layer.scale,
            kv_scale=layer.kv_scale,
        )

    def forward_decode(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """See ``AttentionBackend``."""
        first = batch.num_extend_rows
        return self._work.decode(
            q,
            kv.k,
            batch.page_tables[self.ctx.group_index][first:],
            batch.seq_lens[first:],
            batch.query_start[first:],
            width=batch.decode_width,
            scale=layer.scale,
            kv_scale=layer.kv_scale,
        )

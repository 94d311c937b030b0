"""Multi-head latent attention (DeepSeek-V2, 2024): one latent a token stands for the keys and values of every head.

Decodes attend over the latents themselves, with queries absorbed into their space; prompts hand heads' own queries to the backend, which may expand latents
instead. What the parts of a latent are stands in ``interfaces.attention``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenspeed.errors import ModelError
from tokenspeed.interfaces.attention import AttentionBackend, AttentionLayer, LatentUp
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.interfaces.model import ModelContext, WeightSlot
from tokenspeed.layers.attention import KVSource, PagedLayer
from tokenspeed.layers.dtypes import short_name
from tokenspeed.layers.module import Layer
from tokenspeed.layers.parallel import ParallelGroup, shard_heads
from tokenspeed.layers.quantization import SelectKernel
from tokenspeed.layers.rotary import RopeConfig, logit_factor
from tokenspeed.types import CacheGroup, KVLayout

__all__ = ["LatentAttention", "LatentShape", "MultiHeadLatentAttention"]


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """What the block needs of ``config.json``.

    Attributes:
        q_rank: elements of the latent that queries are made of; 0: they are made of the hidden state.
        rank: elements of a token's latent that stand for keys without position and for values; ``rope_dim`` more are the rotated key.
        nope_dim: elements of a query head that meet no position, ``rope_dim`` those that are rotated; ``v_dim`` elements of a value head.
        scale: factor of the attention logits.
        norm_eps: of the norms of both latents.
        bias: the projections to latents and the output projection have biases.
        kv_scale: what latents are divided by where they are stored, for pages of fp8.
    """

    hidden: int
    q_heads: int
    q_rank: int
    rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    rope: RopeConfig
    norm_eps: float = 1e-6
    bias: bool = False
    kv_scale: float = 1.0

    @classmethod
    def of(cls, config: Any, *, interleaved: bool = True) -> LatentShape:
        """Read ``config.json``. Raises ``ModelError`` for a rotary scaling that is not known.

        Args:
            interleaved: the checkpoint's rotated elements are pairs (2 i, 2 i + 1).
        """
        nope, rope = int(config.qk_nope_head_dim), int(config.qk_rope_head_dim)
        return cls(
            hidden=config.hidden_size,
            q_heads=config.num_attention_heads,
            q_rank=getattr(config, "q_lora_rank", None) or 0,
            rank=config.kv_lora_rank,
            nope_dim=nope,
            rope_dim=rope,
            v_dim=config.v_head_dim,
            scale=(nope + rope) ** -0.5 * logit_factor(config),
            rope=RopeConfig.from_hf(config, rope, interleaved=interleaved),
            bias=bool(getattr(config, "attention_bias", False)),
        )

    def cache_group(self, layers: tuple[int, ...], ranks: int) -> CacheGroup:
        """The latents of ``layers``, which every one of ``ranks`` ranks keeps whole. Raises ``ConfigError`` where the heads cannot be dealt out."""
        shard_heads(self.q_heads, 1, ranks)
        return CacheGroup(
            kind="mla", layers=layers, kv_heads=1, head_dim=self.rank + self.rope_dim, v_head_dim=self.rank
        )


class LatentAttention(PagedLayer):
    """``forward(q (T, q_heads * (nope_dim + rope_dim)), latent (T, rank), key (T, rope_dim), batch) -> (T, q_heads * v_dim)``.

    Rotates, stores latents and attends over them. Changes ``q``. Owns the projection ``prefix`` from latents to keys and values, (q_heads * (nope_dim + v_dim),
    rank) here: keys of all heads, then values of all heads.

    Raises:
        ModelError: the rotary table is not of ``rope_dim`` columns.
    """

    def __init__(
        self,
        prefix: str,
        layer_index: int,
        shape: LatentShape,
        *,
        group: ParallelGroup,
        cos_sin: torch.Tensor,
        layout: KVLayout,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        select: SelectKernel,
        memory: AbstractContextManager[None],
    ) -> None:
        heads = shard_heads(shape.q_heads, 1, group.size).q_heads
        rank, nope, v_dim = shape.rank, shape.nope_dim, shape.v_dim
        if cos_sin.shape[1] != shape.rope_dim:
            raise ModelError(
                f"{prefix}: {cos_sin.shape[1]} of {shape.rope_dim} elements would be rotated; latents take all of them or a smaller rope_dim"
            )
        with memory:
            weight = torch.empty(heads * (nope + v_dim), rank, dtype=dtype, device=device)
        keys, values = weight[: heads * nope].view(heads, nope, rank), weight[heads * nope :].view(heads, v_dim, rank)
        super().__init__(
            AttentionLayer(
                index=layer_index, scale=shape.scale, kv_scale=shape.kv_scale, latent=LatentUp(keys=keys, values=values)
            ),
            q_heads=heads,
            kv_heads=1,
            head_dim=rank + shape.rope_dim,
            layout=layout,
        )
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._prefix, self._shape, self._first = prefix, shape, group.rank * heads
        self._cos_sin, self._interleaved = cos_sin, shape.rope.interleaved
        name = short_name(dtype)
        rotated = {"head_dim": shape.rope_dim, "rotary_dim": shape.rope_dim, "q_heads": heads, "kv_heads": 1}
        self._rotate = select(KernelRequest(family="rope", mode="rotate", dtype=name, shape=rotated))
        self._write = select(
            KernelRequest(
                family="cache",
                mode="write_latent",
                dtype=name,
                layout=layout.value,
                features=frozenset() if kv_dtype == dtype else frozenset({f"kv_{short_name(kv_dtype)}"}),
                shape={"rank": rank, "rope_dim": shape.rope_dim},
            )
        )

    def bind(self, source: KVSource, group_index: int, extend: AttentionBackend, decode: AttentionBackend) -> None:
        """Attach the pages of this layer and the backends of both phases."""
        super().bind(source, group_index, extend, decode)
        self._extend, self._decode = extend.forward_extend_heads, decode.forward_decode
        self._extend_captured = decode.forward_extend_heads

    def forward(self, q: torch.Tensor, latent: torch.Tensor, key: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        layer, kv, up, shape = self.layer, self.kv, self.layer.latent, self._shape
        assert kv is not None, "bind_kv comes before the first forward"
        assert up is not None, "made with the layer"
        tokens, nope, rope = q.shape[0], shape.nope_dim, shape.rope_dim
        heads = q.view(tokens, self.q_heads, nope + rope)
        rotated, key = heads[..., nope:].contiguous(), key.contiguous()
        self._rotate(rotated.view(tokens, -1), key, batch.positions, self._cos_sin, rope, self._interleaved)
        heads[..., nope:] = rotated
        self._wait(layer.index)
        self._write(latent, key, self._k, batch.slot_mapping[self._group_index], self._layout_name, layer.kv_scale)
        self._written(layer.index)
        cut = batch.num_extend_tokens
        extend = self._extend_captured if batch.captured else self._extend
        made = []
        if cut:
            made.append(extend(heads[:cut], kv, layer, batch))
        if cut < tokens:
            made.append(up.project(self._decode(up.absorb(heads[cut:]), kv, layer, batch)))
        out = made[0] if len(made) == 1 else torch.cat(made)
        return out.view(tokens, -1)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The checkpoint's projection, in which each head's values follow its keys."""
        shape = self._shape
        size = (shape.q_heads * (shape.nope_dim + shape.v_dim), shape.rank)
        yield WeightSlot(name=f"{self._prefix}.weight", parameter="weight", shape=size, load=self._load)

    def _load(self, tensor: torch.Tensor) -> None:
        up, shape = self.layer.latent, self._shape
        assert up is not None, "made with the layer"
        heads = tensor.view(shape.q_heads, shape.nope_dim + shape.v_dim, shape.rank)
        own = heads[self._first : self._first + self.q_heads]
        up.keys.copy_(own[:, : shape.nope_dim])
        up.values.copy_(own[:, shape.nope_dim :])


class MultiHeadLatentAttention(Layer):
    """The whole block behind its norm, ``forward(hidden (T, hidden), batch) -> (T, hidden)``, a partial sum of group ``attn``.

    Every rank makes the latents whole and has some of the heads. Names below ``prefix`` are DeepSeek's; the projections to both latents are one.
    """

    def __init__(self, shape: LatentShape, ctx: ModelContext, prefix: str, index: int) -> None:
        super().__init__()
        latent = ("kv_a_proj_with_mqa", shape.rank + shape.rope_dim)
        parts = (("q_a_proj", shape.q_rank), latent) if shape.q_rank else (latent,)
        self._sizes = (shape.q_rank, shape.rank, shape.rope_dim)
        self.a_proj = ctx.linear(
            f"{prefix}.a_proj",
            shape.hidden,
            sum(self._sizes),
            bias=shape.bias,
            group="attn",
            parts=parts,
        )
        heads = shard_heads(shape.q_heads, 1, ctx.tp_size("attn"))
        name, width = ("q_b_proj", shape.q_rank) if shape.q_rank else ("q_proj", shape.hidden)
        self.q_proj = ctx.linear(
            f"{prefix}.{name}",
            width,
            shape.q_heads * (shape.nope_dim + shape.rope_dim),
            shard="column",
            group="attn",
            units=(heads.q_units,),
        )
        self.q_a_layernorm = (
            ctx.rms_norm(f"{prefix}.q_a_layernorm", shape.q_rank, shape.norm_eps) if shape.q_rank else None
        )
        self.kv_a_layernorm = ctx.rms_norm(f"{prefix}.kv_a_layernorm", shape.rank, shape.norm_eps)
        self.attn = ctx.latent_attention(f"{prefix}.kv_b_proj", index, shape)
        self.o_proj = ctx.linear(
            f"{prefix}.o_proj",
            shape.q_heads * shape.v_dim,
            shape.hidden,
            bias=shape.bias,
            shard="row",
            group="attn",
            units=(heads.q_units,),
        )

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        queries, latent, key = self.a_proj(hidden).split(self._sizes, dim=-1)
        if self.q_a_layernorm is not None:
            hidden = self.q_a_layernorm(queries.contiguous())[0]
        latent = self.kv_a_layernorm(latent.contiguous())[0]
        out: torch.Tensor = self.o_proj(self.attn(self.q_proj(hidden), latent, key, batch))
        return out

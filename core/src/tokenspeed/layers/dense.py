"""The dense decoder that many families share: pre-norm blocks of grouped-query attention with rotary positions and a gated MLP.

Module and parameter names are the checkpoint's, but for the fused projections (``qkv_proj``, ``gate_up_proj``), which load their parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.interfaces.model import CausalLM, ModelContext
from tokenspeed.layers.loading import load_weights
from tokenspeed.layers.module import Layer
from tokenspeed.layers.parallel import shard_heads
from tokenspeed.layers.rotary import RopeConfig
from tokenspeed.types import CacheGroup

__all__ = ["DenseCausalLM", "DenseShape"]


@dataclass(frozen=True)
class DenseShape:
    """What the blocks need of ``config.json``, with the defaults that it leaves unsaid.

    Attributes:
        attention_bias: the query, key and value projections have biases, and the output projection unless ``output_bias`` says otherwise.
        window: how many keys a query may look back at, itself included (0: all).
        qk_norm: each query and key head is normed before it is rotated.
        attention_scale: factor of the attention logits; ``None`` is ``head_dim ** -0.5``.
        embedding_scale, residual_scale, logits_scale: factors of the embeddings (given ones too), of what attention and MLP add to the residual, of the logits.
    """

    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: str
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    window: int = 0
    qk_norm: bool = False
    output_bias: bool | None = None
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0

    @classmethod
    def of(cls, config: Any, *, window: int = 0, qk_norm: bool = False) -> DenseShape:
        """Read ``config.json``. Raises ``ModelError`` for a rotary scaling that is not known."""
        q_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // q_heads
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            q_heads=q_heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or q_heads,
            head_dim=head_dim,
            eps=getattr(config, "rms_norm_eps", 1e-6),
            activation=getattr(config, "hidden_act", "silu"),
            attention_bias=bool(getattr(config, "attention_bias", False)),
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            rope=RopeConfig.from_hf(config, head_dim),
            window=window,
            qk_norm=qk_norm,
        )


class _Attention(Layer):
    def __init__(self, shape: DenseShape, ctx: ModelContext, prefix: str, index: int) -> None:
        super().__init__()
        q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        heads = shard_heads(shape.q_heads, shape.kv_heads, ctx.tp_size("attn"))
        self.qkv_proj = ctx.linear(
            f"{prefix}.qkv_proj",
            shape.hidden,
            q + 2 * kv,
            bias=shape.attention_bias,
            shard="column",
            group="attn",
            parts=(("q_proj", q), ("k_proj", kv), ("v_proj", kv)),
            units=(heads.q_units, heads.kv_units, heads.kv_units),
        )
        self.attn = ctx.attention(
            prefix,
            index,
            q_heads=heads.q_heads,
            kv_heads=heads.kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5 if shape.attention_scale is None else shape.attention_scale,
            rope=shape.rope,
            window=shape.window,
            qk_norm_eps=shape.eps if shape.qk_norm else None,
        )
        self.o_proj = ctx.linear(
            f"{prefix}.o_proj",
            q,
            shape.hidden,
            bias=shape.attention_bias if shape.output_bias is None else shape.output_bias,
            shard="row",
            group="attn",
            units=(heads.q_units,),
        )

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out: torch.Tensor = self.o_proj(self.attn(self.qkv_proj(hidden), batch))
        return out


class _MLP(Layer):
    def __init__(self, shape: DenseShape, ctx: ModelContext, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = ctx.gated_linear(
            f"{prefix}.gate_up_proj",
            shape.hidden,
            shape.intermediate,
            activation=shape.activation,
            bias=shape.mlp_bias,
        )
        self.down_proj = ctx.linear(
            f"{prefix}.down_proj", shape.intermediate, shape.hidden, bias=shape.mlp_bias, shard="row"
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.gate_up_proj(hidden))
        return out


class _Block(Layer):
    def __init__(self, shape: DenseShape, ctx: ModelContext, prefix: str, index: int) -> None:
        super().__init__()
        # The MLP before this block leaves a partial sum; the embedding before the first one is complete.
        before = "dense" if index else ""
        self.input_layernorm = ctx.rms_norm(f"{prefix}.input_layernorm", shape.hidden, shape.eps, reduce=before)
        self.self_attn = _Attention(shape, ctx, f"{prefix}.self_attn", index)
        self.post_attention_layernorm = ctx.rms_norm(
            f"{prefix}.post_attention_layernorm", shape.hidden, shape.eps, reduce="attn"
        )
        self.mlp = _MLP(shape, ctx, f"{prefix}.mlp")
        self._scale = shape.residual_scale

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = _scaled(self.self_attn(hidden, batch), self._scale)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return _scaled(self.mlp(hidden), self._scale), residual


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``x`` times ``factor``; a partial sum stays one."""
    return x if factor == 1.0 else x * factor


class _Decoder(Layer):
    def __init__(self, config: Any, shape: DenseShape, ctx: ModelContext, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = ctx.embedding(f"{prefix}.embed_tokens", config.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(
            _Block(shape, ctx, f"{prefix}.layers.{index}", index) for index in range(config.num_hidden_layers)
        )
        self.norm = ctx.rms_norm(f"{prefix}.norm", shape.hidden, shape.eps, reduce="dense")
        self._scale = shape.embedding_scale

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        given = batch.inputs_embeds
        # A copy of given ones: the hidden states become the residual, which is added to in place.
        hidden = _scaled(self.embed_tokens(batch.input_ids) if given is None else given.clone(), self._scale)
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, batch)
        out: torch.Tensor = self.norm(hidden, residual)[0]
        return out


class DenseCausalLM(CausalLM):
    """The whole model, tensor parallel over the groups ``attn`` and ``dense``. A family says in ``shape`` how it differs.

    Raises:
        ModelError: the config asks for an activation or a rotary scaling that is not known.
        ConfigError: the heads cannot be dealt out to the ranks.
    """

    def __init__(self, config: Any, ctx: ModelContext, prefix: str = "") -> None:
        super().__init__()
        self._tied = bool(getattr(config, "tie_word_embeddings", False))
        self._prefix = prefix
        shape = self.shape(config)
        self.model = _Decoder(config, shape, ctx, f"{prefix}model")
        tied = self.model.embed_tokens if self._tied else None
        self.lm_head = ctx.lm_head(f"{prefix}lm_head", config.vocab_size, shape.hidden, tied=tied)
        self._logits_scale = shape.logits_scale

    @classmethod
    def shape(cls, config: Any) -> DenseShape:
        """The family's blocks; default: neither window nor head norms."""
        return DenseShape.of(config)

    @classmethod
    def cache_groups(cls, config: Any, tp_size: int) -> list[CacheGroup]:
        shape = cls.shape(config)
        heads = shard_heads(shape.q_heads, shape.kv_heads, tp_size)
        return [
            CacheGroup(
                kind="full",
                layers=tuple(range(config.num_hidden_layers)),
                kv_heads=heads.kv_heads,
                head_dim=shape.head_dim,
                v_head_dim=shape.head_dim,
            )
        ]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        out: torch.Tensor = self.model(batch)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _scaled(self.lm_head(hidden), self._logits_scale)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_weights(self, weights, ignore=self._not_needed)

    def _not_needed(self, name: str) -> bool:
        """Old checkpoints store rotary frequencies; some store the head that is tied to the embedding again."""
        return name.endswith("rotary_emb.inv_freq") or (self._tied and name == f"{self._prefix}lm_head.weight")

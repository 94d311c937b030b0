"""``ToyForCausalLM``: two layers of random weights over bytes. Small enough for any test, made of the same layers as a real model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.interfaces.model import CausalLM, ModelContext
from tokenspeed.layers import Layer, RopeConfig, load_weights, shard_heads
from tokenspeed.types import CacheGroup

__all__ = ["ToyForCausalLM"]


class ToyForCausalLM(CausalLM):
    """A pre-norm transformer without biases. ``config`` is ``weights.toy.TOY_CONFIG`` or a variation of it."""

    def __init__(self, config: Any, ctx: ModelContext, prefix: str = "") -> None:
        super().__init__()
        self.embed = ctx.embedding(f"{prefix}embed", config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            _Block(config, ctx, f"{prefix}blocks.{i}", i) for i in range(config.num_hidden_layers)
        )
        self.norm = ctx.rms_norm(f"{prefix}norm", config.hidden_size, config.rms_norm_eps, reduce="dense")
        tied = self.embed if config.tie_word_embeddings else None
        self.head = ctx.lm_head(f"{prefix}head", config.vocab_size, config.hidden_size, tied=tied)

    @classmethod
    def cache_groups(cls, config: Any, tp_size: int) -> list[CacheGroup]:
        heads = shard_heads(config.num_attention_heads, config.num_key_value_heads, tp_size)
        layers = tuple(range(config.num_hidden_layers))
        return [
            CacheGroup(
                kind="full",
                layers=layers,
                kv_heads=heads.kv_heads,
                head_dim=config.head_dim,
                v_head_dim=config.head_dim,
            )
        ]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = self.embed(batch.input_ids)
        residual = None
        for block in self.blocks:
            hidden, residual = block(hidden, residual, batch)
        out: torch.Tensor = self.norm(hidden, residual)[0]
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(hidden)
        return out

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_weights(self, weights)


class _Block(Layer):
    def __init__(self, config: Any, ctx: ModelContext, prefix: str, index: int) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        heads = shard_heads(config.num_attention_heads, config.num_key_value_heads, ctx.tp_size("attn"))
        q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.norm1 = ctx.rms_norm(f"{prefix}.norm1", hidden, config.rms_norm_eps, reduce="dense" if index else "")
        self.qkv = ctx.linear(
            f"{prefix}.qkv",
            hidden,
            q + 2 * kv,
            shard="column",
            group="attn",
            parts=(("q", q), ("k", kv), ("v", kv)),
            units=(heads.q_units, heads.kv_units, heads.kv_units),
        )
        self.attention = ctx.attention(
            f"{prefix}.attention",
            index,
            q_heads=heads.q_heads,
            kv_heads=heads.kv_heads,
            head_dim=dim,
            scale=dim**-0.5,
            rope=RopeConfig.from_hf(config, dim),
        )
        self.out = ctx.linear(f"{prefix}.out", q, hidden, shard="row", group="attn", units=(heads.q_units,))
        self.norm2 = ctx.rms_norm(f"{prefix}.norm2", hidden, config.rms_norm_eps, reduce="attn")
        self.up = ctx.gated_linear(f"{prefix}.up", hidden, config.intermediate_size, parts=("gate", "up"))
        self.down = ctx.linear(f"{prefix}.down", config.intermediate_size, hidden, shard="row")

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.norm1(hidden, residual)
        hidden = self.out(self.attention(self.qkv(hidden), batch))
        hidden, residual = self.norm2(hidden, residual)
        return self.down(self.up(hidden)), residual

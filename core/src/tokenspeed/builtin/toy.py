"""``ToyForCausalLM``: two layers of random weights over bytes. Small enough for any test, made of the same layers as a real model.

``layer_types`` in the config (``full_attention``, ``sliding_attention``, ``linear_attention`` for each layer) gives it windows of ``sliding_window`` tokens
and recurrent layers, whose states can be kept every ``state_interval`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.interfaces.model import CausalLM, ModelContext
from tokenspeed.layers import Layer, RecurrentLayer, RopeConfig, load_weights, shard_heads
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
        shape = {"kv_heads": heads.kv_heads, "head_dim": config.head_dim, "v_head_dim": config.head_dim}
        groups = [CacheGroup(kind="full", layers=_layers(config, "full_attention"), **shape)]
        if windows := _layers(config, "sliding_attention"):
            groups.append(CacheGroup(kind="window", layers=windows, window=config.sliding_window, **shape))
        if states := _layers(config, "linear_attention"):
            groups.append(
                CacheGroup(
                    kind="recurrent",
                    layers=states,
                    states=((config.hidden_size // tp_size,),),
                    interval=config.state_interval,
                )
            )
        return groups

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


def _layers(config: Any, kind: str) -> tuple[int, ...]:
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return tuple(index for index, layer_type in enumerate(types) if layer_type == kind)


class _Scan(RecurrentLayer):
    """``state = keep * state + (1 - keep) * value`` for each token, element by element."""

    def __init__(self, config: Any, ctx: ModelContext, prefix: str, index: int) -> None:
        super().__init__(index)
        hidden = config.hidden_size
        parts = (("keep", hidden), ("value", hidden))
        self.parts = ctx.linear(f"{prefix}.parts", hidden, 2 * hidden, shard="column", group="attn", parts=parts)
        self.out = ctx.linear(f"{prefix}.out", hidden, hidden, shard="row", group="attn")

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        keep, value = self.parts(hidden).chunk(2, dim=-1)
        keep = keep.sigmoid()
        (states,) = self.states
        out = torch.empty_like(value)
        for at, begin, end in self.rows(batch):
            state = states[at]
            for token in range(begin, end):
                state = keep[token] * state + (1 - keep[token]) * value[token]
                out[token] = state
            states[at] = state
        scanned: torch.Tensor = self.out(out)
        return scanned


class _Block(Layer):
    def __init__(self, config: Any, ctx: ModelContext, prefix: str, index: int) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        heads = shard_heads(config.num_attention_heads, config.num_key_value_heads, ctx.tp_size("attn"))
        q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.norm1 = ctx.rms_norm(f"{prefix}.norm1", hidden, config.rms_norm_eps, reduce="dense" if index else "")
        self.scan = (
            _Scan(config, ctx, f"{prefix}.scan", index) if index in _layers(config, "linear_attention") else None
        )
        if self.scan is None:
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
                window=config.sliding_window if index in _layers(config, "sliding_attention") else 0,
            )
            self.out = ctx.linear(f"{prefix}.out", q, hidden, shard="row", group="attn", units=(heads.q_units,))
        self.norm2 = ctx.rms_norm(f"{prefix}.norm2", hidden, config.rms_norm_eps, reduce="attn")
        self.up = ctx.gated_linear(f"{prefix}.up", hidden, config.intermediate_size, parts=("gate", "up"))
        self.down = ctx.linear(f"{prefix}.down", config.intermediate_size, hidden, shard="row")

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.norm1(hidden, residual)
        hidden = self.mix(hidden, batch) if self.scan is None else self.scan(hidden, batch)
        hidden, residual = self.norm2(hidden, residual)
        return self.down(self.up(hidden)), residual

    def mix(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Attention."""
        mixed: torch.Tensor = self.out(self.attention(self.qkv(hidden), batch))
        return mixed

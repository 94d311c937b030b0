"""DeepSeek V2 and V3: multi-head latent attention in every layer, a gated MLP in the first layers and a mixture of experts in the others.

Published in "DeepSeek-V2" (2024) and "DeepSeek-V3 Technical Report" (2024). Module and parameter names are the checkpoint's, but for fused projections, which
load their parts.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tokenspeed.errors import ModelError
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.interfaces.model import CausalLM, ModelContext
from tokenspeed.layers import LatentShape, Layer, MixtureOfExperts, MultiHeadLatentAttention, Routing, load_weights
from tokenspeed.types import CacheGroup

__all__ = ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"]

_log = logging.getLogger(__name__)


class _MLP(Layer):
    def __init__(self, config: Any, ctx: ModelContext, prefix: str) -> None:
        super().__init__()
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_up_proj = ctx.gated_linear(
            f"{prefix}.gate_up_proj",
            config.hidden_size,
            config.intermediate_size,
            activation=getattr(config, "hidden_act", "silu"),
            bias=bias,
        )
        self.down_proj = ctx.linear(
            f"{prefix}.down_proj", config.intermediate_size, config.hidden_size, bias=bias, shard="row"
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.gate_up_proj(hidden))
        return out


class _Block(Layer):
    """One layer; ``before`` is the parallel group of the partial sum that comes in, ``routing`` ``None`` for a dense layer."""

    def __init__(
        self,
        config: Any,
        shape: LatentShape,
        routing: Routing | None,
        ctx: ModelContext,
        prefix: str,
        index: int,
        before: str,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = ctx.rms_norm(f"{prefix}.input_layernorm", hidden, eps, reduce=before)
        self.self_attn = MultiHeadLatentAttention(shape, ctx, f"{prefix}.self_attn", index)
        self.post_attention_layernorm = ctx.rms_norm(f"{prefix}.post_attention_layernorm", hidden, eps, reduce="attn")
        self.mlp: nn.Module
        if routing is None:
            self.mlp = _MLP(config, ctx, f"{prefix}.mlp")
        else:
            self.mlp = MixtureOfExperts(
                ctx,
                f"{prefix}.mlp",
                hidden,
                config.moe_intermediate_size,
                routing,
                shared=config.moe_intermediate_size * (getattr(config, "n_shared_experts", None) or 0),
                activation=getattr(config, "hidden_act", "silu"),
                bias=bool(getattr(config, "mlp_bias", False)),
            )

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden, residual = self.post_attention_layernorm(self.self_attn(hidden, batch), residual)
        return self.mlp(hidden), residual


class _Decoder(Layer):
    def __init__(self, config: Any, shape: LatentShape, routing: Routing, ctx: ModelContext, prefix: str) -> None:
        super().__init__()
        dense = config.first_k_dense_replace
        self.embed_tokens = ctx.embedding(f"{prefix}.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()
        before = ""  # the embedding is whole
        for index in range(config.num_hidden_layers):
            own = None if index < dense else routing
            self.layers.append(_Block(config, shape, own, ctx, f"{prefix}.layers.{index}", index, before))
            before = "dense" if own is None else "moe"
        self.norm = ctx.rms_norm(f"{prefix}.norm", config.hidden_size, config.rms_norm_eps, reduce=before)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        given = batch.inputs_embeds
        # A copy of given ones: the hidden states become the residual, which is added to in place.
        hidden = self.embed_tokens(batch.input_ids) if given is None else given.clone()
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, batch)
        out: torch.Tensor = self.norm(hidden, residual)[0]
        return out


class _DeepseekCausalLM(CausalLM):
    """The whole model, tensor parallel over the groups ``attn``, ``dense`` and ``moe``; layers of multi-token prediction are left out.

    Raises:
        ModelError: ``config.json`` asks for something that is not served.
        ConfigError: the heads cannot be dealt out to the ranks.
    """

    def __init__(self, config: Any, ctx: ModelContext, prefix: str = "") -> None:
        super().__init__()
        if (every := getattr(config, "moe_layer_freq", 1)) != 1:
            raise ModelError(f"moe_layer_freq {every} is not supported: every layer behind the dense ones has experts")
        self._tied = bool(getattr(config, "tie_word_embeddings", False))
        self._prefix = prefix
        self._layers = int(config.num_hidden_layers)
        self._further = int(getattr(config, "num_nextn_predict_layers", None) or 0)
        self.model = _Decoder(config, self.latents(config), self.routing(config), ctx, f"{prefix}model")
        tied = self.model.embed_tokens if self._tied else None
        self.lm_head = ctx.lm_head(f"{prefix}lm_head", config.vocab_size, config.hidden_size, tied=tied)
        if self._further:
            _log.info("The checkpoint's layers of multi-token prediction (%d) are left out: no drafting", self._further)

    @classmethod
    def latents(cls, config: Any) -> LatentShape:
        """The attention of every layer."""
        return LatentShape.of(config, interleaved=bool(getattr(config, "rope_interleave", True)))

    @classmethod
    @abstractmethod
    def routing(cls, config: Any) -> Routing:
        """How tokens choose experts. Raises ``ModelError`` for a way that is not served."""

    @classmethod
    def cache_groups(cls, config: Any, tp_size: int) -> list[CacheGroup]:
        return [cls.latents(config).cache_group(tuple(range(config.num_hidden_layers)), tp_size)]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        out: torch.Tensor = self.model(batch)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(hidden)
        return out

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_weights(self, weights, ignore=self._not_needed)

    def _not_needed(self, name: str) -> bool:
        """Rotary frequencies of old checkpoints, a head that is tied, and layers of multi-token prediction, which follow the others."""
        if name.endswith("rotary_emb.inv_freq") or (self._tied and name == f"{self._prefix}lm_head.weight"):
            return True
        number = name.removeprefix(f"{self._prefix}model.layers.").partition(".")[0]
        return number.isdecimal() and self._layers <= int(number) < self._layers + self._further


class DeepseekV2ForCausalLM(_DeepseekCausalLM):
    """DeepSeek V2: softmax over all experts, the best of all or of the best groups, weights as they are."""

    @classmethod
    def routing(cls, config: Any) -> Routing:
        method = getattr(config, "topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ModelError(
                f"topk_method {method!r} is not supported for DeepSeek V2 (supported: greedy, group_limited_greedy)"
            )
        _expect(config, "scoring_func", "softmax")
        _expect(config, "norm_topk_prob", False)
        limited = method == "group_limited_greedy"
        return Routing(
            experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            renormalize=False,
            groups=(config.n_group or 1) if limited else 1,
            kept_groups=(config.topk_group or 1) if limited else 1,
            scale=float(getattr(config, "routed_scaling_factor", 1.0)),
        )


class DeepseekV3ForCausalLM(_DeepseekCausalLM):
    """DeepSeek V3 and R1: a sigmoid for each expert, a learnt bias on the choice, groups by their two best."""

    @classmethod
    def routing(cls, config: Any) -> Routing:
        _expect(config, "topk_method", "noaux_tc")
        _expect(config, "scoring_func", "sigmoid")
        return Routing(
            experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            scoring="sigmoid",
            renormalize=bool(getattr(config, "norm_topk_prob", True)),
            bias=True,
            groups=config.n_group or 1,
            kept_groups=config.topk_group or 1,
            group_best=2,
            scale=float(getattr(config, "routed_scaling_factor", 1.0)),
        )


def _expect(config: Any, key: str, value: object) -> None:
    given = getattr(config, key, value)
    if given is not None and given != value:
        raise ModelError(f"{key} {given!r} is not supported for {config.architectures[0]} (supported: {value!r})")

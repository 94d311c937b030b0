"""``interfaces.model.ModelContext`` over one rank's kernels, groups and device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from tokenspeed.errors import NothingFitsError
from tokenspeed.layers.activation import GatedActivation, GatedPair, activation_mode
from tokenspeed.layers.attention import Attention
from tokenspeed.layers.dtypes import short_name
from tokenspeed.layers.embedding import Embedding, LMHead
from tokenspeed.layers.latent import LatentAttention, LatentShape
from tokenspeed.layers.linear import Linear
from tokenspeed.layers.moe import Experts, Router, Routing
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.parallel import ParallelGroups
from tokenspeed.layers.quantization import QuantizationMethod, SelectKernel, Unquantized
from tokenspeed.layers.rotary import RopeConfig, cos_sin_table
from tokenspeed.types import KVLayout

__all__ = ["LayerContext"]

_log = logging.getLogger(__name__)


class LayerContext:
    """Makes layers for one model on one rank.

    Args:
        dtype: element type of weights and activations.
        select_kernel: ``KernelRegistry.select``; every layer asks once, when it is made.
        groups: parallel groups of this rank; default: all of one rank.
        kv_layout: order of the axes of the pages that attention layers write; ``kv_dtype`` their element type (default ``dtype``).
        max_positions: rows of the rotary tables, ``max_model_len``; 0 takes the model's own maximum.
        quantization: default unquantised.
        allocate: ``Platform.allocate``; weights are made under the tag ``weights``.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        select_kernel: SelectKernel,
        groups: ParallelGroups | None = None,
        kv_layout: KVLayout = KVLayout.NHD,
        kv_dtype: torch.dtype | None = None,
        max_positions: int = 0,
        quantization: QuantizationMethod | None = None,
        allocate: Callable[[str], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.dtype, self.device = dtype, device
        self._select = select_kernel
        self._groups = groups or ParallelGroups()
        self._kv_layout, self._kv_dtype = kv_layout, kv_dtype or dtype
        self._max_positions = max_positions
        self._method = quantization or Unquantized()
        self._allocate = allocate or _untagged
        self._tables: dict[RopeConfig, torch.Tensor] = {}
        self._told_unfused = False

    def tp_size(self, group: str = "attn") -> int:
        return self._groups[group].size

    def linear(
        self,
        prefix: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        shard: str = "replicated",
        group: str = "dense",
        parts: Sequence[tuple[str, int]] = (),
        units: Sequence[int] = (),
    ) -> nn.Module:
        return self._linear(
            prefix,
            in_features,
            out_features,
            bias=bias,
            shard=shard,
            group=group,
            parts=parts,
            units=units,
            mode="linear",
        )

    def gated_linear(
        self,
        prefix: str,
        in_features: int,
        intermediate: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        group: str = "dense",
        parts: tuple[str, str] = ("gate_proj", "up_proj"),
    ) -> nn.Module:
        def make(mode: str) -> Linear:
            fused = [(name, intermediate) for name in parts]
            return self._linear(
                prefix,
                in_features,
                2 * intermediate,
                bias=bias,
                shard="column",
                group=group,
                parts=fused,
                units=(),
                mode=mode,
            )

        if activation_mode(activation) == "silu_and_mul":
            try:
                return make("linear_silu_mul")
            except NothingFitsError as error:  # no fused kernel on this platform
                if error.broken and not self._told_unfused:
                    self._told_unfused = True
                    _log.warning("kernel gemm.linear_silu_mul: gate and up run one after the other: %s", error.broken)
        return GatedPair(make("linear"), self.gated_mlp_activation(activation))

    def _linear(
        self,
        prefix: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        shard: str,
        group: str,
        parts: Sequence[tuple[str, int]],
        units: Sequence[int],
        mode: str,
    ) -> Linear:
        return Linear(
            prefix,
            in_features,
            out_features,
            bias=bias,
            shard=shard,
            group=self._groups[group],
            parts=parts,
            units=units,
            dtype=self.dtype,
            device=self.device,
            method=self._method,
            select=self._select,
            memory=self._allocate("weights"),
            mode=mode,
        )

    def embedding(self, prefix: str, vocab_size: int, hidden: int) -> nn.Module:
        return Embedding(
            prefix,
            vocab_size,
            hidden,
            group=self._groups["dense"],
            dtype=self.dtype,
            device=self.device,
            select=self._select,
            memory=self._allocate("weights"),
        )

    def lm_head(
        self, prefix: str, vocab_size: int, hidden: int, *, tied: nn.Module | None = None, bias: bool = False
    ) -> nn.Module:
        if tied is not None and not isinstance(tied, Embedding):
            raise TypeError(f"{prefix}: tied must be what embedding() returned, not {type(tied).__name__}")
        return LMHead(
            prefix,
            vocab_size,
            hidden,
            tied=tied,
            bias=bias,
            group=self._groups["dense"],
            dtype=self.dtype,
            device=self.device,
            select=self._select,
            memory=self._allocate("weights"),
        )

    def rms_norm(self, prefix: str, hidden: int, eps: float, *, reduce: str = "") -> nn.Module:
        return RMSNorm(
            prefix,
            hidden,
            eps,
            reduce=self._groups[reduce] if reduce else None,
            dtype=self.dtype,
            device=self.device,
            select=self._select,
            memory=self._allocate("weights"),
        )

    def attention(
        self,
        prefix: str,
        layer_index: int,
        *,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        rope: RopeConfig | None = None,
        window: int = 0,
        softcap: float = 0.0,
        qk_norm_eps: float | None = None,
    ) -> nn.Module:
        return Attention(
            prefix,
            layer_index,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=scale,
            cos_sin=self._table(rope),
            interleaved=rope is not None and rope.interleaved,
            window=window,
            softcap=softcap,
            qk_norm_eps=qk_norm_eps,
            layout=self._kv_layout,
            dtype=self.dtype,
            kv_dtype=self._kv_dtype,
            device=self.device,
            select=self._select,
            memory=self._allocate("weights"),
        )

    def latent_attention(self, prefix: str, layer_index: int, shape: LatentShape) -> nn.Module:
        return LatentAttention(
            prefix,
            layer_index,
            shape,
            group=self._groups["attn"],
            cos_sin=self._table(shape.rope),
            layout=self._kv_layout,
            dtype=self.dtype,
            kv_dtype=self._kv_dtype,
            device=self.device,
            select=self._select,
            memory=self._allocate("weights"),
        )

    def router(self, prefix: str, hidden: int, routing: Routing) -> nn.Module:
        return Router(
            prefix,
            hidden,
            routing,
            dtype=self.dtype,
            device=self.device,
            select=self._select,
            memory=self._allocate("weights"),
        )

    def experts(self, prefix: str, hidden: int, intermediate: int, routing: Routing) -> nn.Module:
        return Experts(
            prefix,
            hidden,
            intermediate,
            routing,
            group=self._groups["moe"],
            dtype=self.dtype,
            device=self.device,
            select=self._select,
            memory=self._allocate("weights"),
        )

    def gated_mlp_activation(self, name: str) -> nn.Module:
        return GatedActivation(name, dtype=short_name(self.dtype), select=self._select)

    def _table(self, rope: RopeConfig | None) -> torch.Tensor:
        """The rotary table, made once for all layers that share a configuration."""
        # Without positions: a table of no columns, which rotates nothing.
        key = rope or RopeConfig(rotary_dim=0, max_position=1)
        if key not in self._tables:
            positions = self._max_positions or key.max_position
            self._tables[key] = cos_sin_table(key, positions, self.device)
        return self._tables[key]


def _untagged(tag: str) -> AbstractContextManager[None]:  # noqa: ARG001
    return nullcontext()

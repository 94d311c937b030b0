"""Contract of a model (``ModelSpec``, API 1) and the context it builds itself from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from tokenspeed.types import CacheGroup

if TYPE_CHECKING:
    from tokenspeed.interfaces.batch import ForwardBatch

__all__ = ["CausalLM", "ModelContext", "WeightSlot"]


@dataclass(frozen=True, kw_only=True)
class WeightSlot:
    """A place in a module for one tensor of the checkpoint. Modules that own weights list theirs with ``weight_slots()``.

    Attributes:
        name: the tensor's name in the checkpoint.
        parameter: name of the parameter it goes to (or into a part of), within the module.
        shape: shape of the checkpoint's tensor, of the whole model (not of this rank's shard).
        load: takes the whole tensor and copies this rank's part into place; may be called again.
        ones: a scale, whose neutral value is 1 (random weights start there).
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
    ones: bool = False


class ModelContext(Protocol):
    """Makes a model's layers. The model never chooses a kernel, a backend or a shard; they stand behind these methods.

    ``prefix`` is the layer's name in the checkpoint; ``shard`` is ``column``, ``row`` or ``replicated``; ``group`` is the parallel group, ``attn``,
    ``dense`` or ``moe``. Layers are ``nn.Module`` of ``tokenspeed.layers``.
    """

    dtype: torch.dtype
    device: torch.device

    def tp_size(self, group: str = "attn") -> int:
        """Ranks that a sharded layer of ``group`` is spread over."""

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
        """``forward(x (T, in)) -> (T, out on this rank)``. ``parts`` names the checkpoint's tensors and sizes fused along the output, for example
        ``(("q_proj", 576), ("k_proj", 192), ("v_proj", 192))``. A ``row`` shard's output is partial; the norm that consumes it reduces it.

        ``units`` says into how many indivisible blocks (heads, say) the sharded axis of each part falls; left out, single elements. A rank takes
        ``ceil(units / ranks)`` consecutive blocks, zeros standing in for blocks past the end; with fewer units than ranks, ranks share a block
        (``layers.parallel.shard_slice``)."""

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
        """``forward(x (T, in)) -> (T, intermediate on this rank)``: the gate's activation times the up projection, column sharded, in one kernel where
        there is one. ``parts`` names the checkpoint's gate and up tensors beside ``prefix``."""

    def embedding(self, prefix: str, vocab_size: int, hidden: int) -> nn.Module:
        """``forward(ids (T)) -> (T, hidden)``."""

    def lm_head(
        self, prefix: str, vocab_size: int, hidden: int, *, tied: nn.Module | None = None, bias: bool = False
    ) -> nn.Module:
        """``forward(x (R, hidden)) -> (R, vocab)`` gathered over ranks; shares ``tied``'s weight where given."""

    def rms_norm(self, prefix: str, hidden: int, eps: float, *, reduce: str = "") -> nn.Module:
        """``forward(x, residual=None) -> (normed, residual)``; a given ``residual`` is added to in place, otherwise ``x`` becomes it. ``reduce`` names
        the parallel group whose partial ``x`` is summed first."""

    def attention(
        self,
        prefix: str,
        layer_index: int,
        *,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        rope: Any = None,
        window: int = 0,
        softcap: float = 0.0,
        qk_norm_eps: float | None = None,
    ) -> nn.Module:
        """``forward(qkv (T, (q + 2 kv) * head_dim), batch) -> (T, q * head_dim)``; ``q_heads`` and ``kv_heads`` are this rank's. ``rope`` is a
        ``tokenspeed.layers.RopeConfig``, ``None`` leaves positions out. With
        ``qk_norm_eps`` the module owns weights ``q_norm`` and ``k_norm`` under ``prefix``."""

    def latent_attention(self, prefix: str, layer_index: int, shape: Any) -> nn.Module:
        """Multi-head latent attention between its projections: ``forward(q (T, q_heads * (nope_dim + rope_dim)), latent (T, rank), key (T, rope_dim), batch)
        -> (T, q_heads * v_dim)`` with the heads of this rank; changes ``q``. ``shape`` is a ``tokenspeed.layers.LatentShape``, ``prefix`` names the
        checkpoint's projection from latents to keys and values."""

    def router(self, prefix: str, hidden: int, routing: Any) -> nn.Module:
        """``forward(x (T, hidden)) -> (weights (T, top_k) fp32, experts (T, top_k) int64)``; ``routing`` is a ``tokenspeed.layers.Routing``. Its tensors are
        ``weight`` and ``e_score_correction_bias`` under ``prefix``."""

    def experts(self, prefix: str, hidden: int, intermediate: int, routing: Any) -> nn.Module:
        """``forward(x (T, hidden), weights, experts) -> (T, hidden)``, a partial sum of group ``moe``. The tensors are ``0.gate_proj.weight``,
        ``0.up_proj.weight``, ``0.down_proj.weight`` and so on under ``prefix``."""

    def gated_mlp_activation(self, name: str) -> nn.Module:
        """``forward(gate_up (T, 2 I)) -> (T, I)`` for ``silu`` or ``gelu_pytorch_tanh``."""


class CausalLM(nn.Module):
    """A decoder-only language model over a paged cache.

    Implementations take ``(config, ctx, prefix="")`` where ``config`` is the parsed ``config.json`` (attribute access, ``transformers`` names).
    """

    @classmethod
    @abstractmethod
    def cache_groups(cls, config: Any, tp_size: int) -> list[CacheGroup]:
        """The cache groups of one rank, before any weight exists. Group 0 sets the granularity of prefix reuse."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states (tokens, hidden) after the final norm."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) -> (rows, vocabulary)."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take tensors by checkpoint name; returns the parameter names that were filled. May be called again, in place.

        Raises:
            ModelError: a tensor has no place in the model or the wrong shape.
        """

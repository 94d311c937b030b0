"""Mixtures of experts: a router that sends each token to a few gated MLPs, whose intermediate axis is spread over the ranks of group ``moe``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tokenspeed.errors import ModelError, PluginError
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.interfaces.model import ModelContext, WeightSlot
from tokenspeed.layers.dtypes import short_name
from tokenspeed.layers.module import Layer
from tokenspeed.layers.parallel import ParallelGroup, shard_slice
from tokenspeed.layers.quantization import SelectKernel

__all__ = ["Experts", "MixtureOfExperts", "Router", "Routing"]

_SCORING = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens choose among experts.

    Attributes:
        scoring: ``softmax`` over all experts, or each one's ``sigmoid``.
        renormalize: the weights of a token sum to one, before ``scale``.
        bias: a learnt bias moves the choice and not the weights (DeepSeek-V3, 2024).
        groups: equal blocks of experts, of which a token may use those of ``kept_groups``; a group counts as the sum of its ``group_best`` best scores.
        scale: factor of the weights.
    """

    experts: int
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1
    scale: float = 1.0

    def check(self) -> None:
        """Raise ``ModelError`` for a way of scoring that does not exist, or numbers that do not go together."""
        if self.scoring not in _SCORING:
            raise ModelError(f"a router's scoring is one of {', '.join(_SCORING)}, not {self.scoring!r}")
        if self.groups < 1 or self.experts % self.groups:
            raise ModelError(f"{self.experts} experts cannot be cut in {self.groups} equal groups")
        size = self.experts // self.groups
        if not 1 <= self.kept_groups <= self.groups or self.group_best > size:
            raise ModelError(
                f"{self.kept_groups} of {self.groups} groups of {size} experts by their {self.group_best} best are no choice"
            )
        if not 1 <= self.top_k <= self.kept_groups * size:
            raise ModelError(f"a token cannot have {self.top_k} of {self.kept_groups * size} experts")


class Router(Layer):
    """``forward(x (T, hidden)) -> (weights (T, top_k) fp32, experts (T, top_k) int64)``; scores are computed in fp32, and its parameters are kept so.

    Raises:
        ModelError: ``routing`` asks for what does not exist or go together.
    """

    def __init__(
        self,
        prefix: str,
        hidden: int,
        routing: Routing,
        *,
        dtype: torch.dtype,
        device: torch.device,
        select: SelectKernel,
        memory: AbstractContextManager[None],
    ) -> None:
        super().__init__()
        routing.check()
        self._prefix, self._routing = prefix, routing
        grouped = routing.groups > 1
        self.bias: nn.Parameter | None
        with memory:
            weight = torch.empty(routing.experts, hidden, dtype=torch.float32, device=device)
            bias = torch.zeros(routing.experts, dtype=torch.float32, device=device) if routing.bias else None
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        asked = {"sigmoid": routing.scoring == "sigmoid", "bias": routing.bias, "groups": grouped}
        self._linear = select(
            KernelRequest(family="gemm", mode="linear", dtype="fp32", shape={"n": routing.experts, "k": hidden})
        )
        self._route = select(
            KernelRequest(
                family="moe",
                mode="route",
                dtype="fp32",
                features=frozenset(name for name, wanted in asked.items() if wanted),
                shape={"experts": routing.experts, "top_k": routing.top_k},
            )
        )
        self._matrix, self._moves = weight, bias
        self._narrow = dtype != torch.float32
        self._more: dict[str, Any] = (
            {"groups": routing.groups, "kept_groups": routing.kept_groups, "group_best": routing.group_best}
            if grouped
            else {}
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = self._routing
        logits = self._linear(x.float() if self._narrow else x, self._matrix, None)
        weights, chosen = self._route(
            logits, routing.top_k, routing.scoring, routing.renormalize, self._moves, **self._more
        )
        return weights if routing.scale == 1.0 else weights * routing.scale, chosen

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The scores' matrix and the bias of the choice, where there is one."""
        for name, key, parameter in (
            ("weight", "weight", self.weight),
            ("e_score_correction_bias", "bias", self.bias),
        ):
            if parameter is not None:
                yield WeightSlot(
                    name=f"{self._prefix}.{name}",
                    parameter=key,
                    shape=tuple(parameter.shape),
                    load=partial(_copy, parameter.data),
                )


def _copy(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor)


class Experts(Layer):
    """``forward(x (T, hidden), weights (T, top_k) fp32, chosen (T, top_k) int64) -> (T, hidden)``, a partial sum of group ``moe``.

    Each expert is ``down(silu(gate(x)) * up(x))``; every rank has ``ceil(intermediate / ranks)`` elements of the intermediate axis of all of them, zeros
    standing in past its end.

    Attributes:
        captures: the kernel can be captured in graphs.
    """

    def __init__(
        self,
        prefix: str,
        hidden: int,
        intermediate: int,
        routing: Routing,
        *,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
        select: SelectKernel,
        memory: AbstractContextManager[None],
    ) -> None:
        super().__init__()
        self._prefix, self._hidden, self._intermediate, self._count = prefix, hidden, intermediate, routing.experts
        self._cut = cut = shard_slice(intermediate, intermediate, group.rank, group.size)
        with memory:
            gate_up = torch.empty(routing.experts, 2 * cut.local, hidden, dtype=dtype, device=device)
            down = torch.empty(routing.experts, hidden, cut.local, dtype=dtype, device=device)
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)
        self._weights = (gate_up, down)

        def request(features: frozenset[str]) -> KernelRequest:
            return KernelRequest(
                family="moe",
                mode="experts",
                dtype=short_name(dtype),
                features=features,
                shape={
                    "experts": routing.experts,
                    "top_k": routing.top_k,
                    "hidden": hidden,
                    "intermediate": cut.local,
                },
            )

        try:
            self._kernel, self.captures = select(request(frozenset({"captures"}))), True
        except PluginError:  # none can, or not the one that was asked for
            self._kernel, self.captures = select(request(frozenset())), False

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._kernel(x, *self._weights, weights, chosen)
        return out

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Three tensors of every expert."""
        into, back = (self._intermediate, self._hidden), (self._hidden, self._intermediate)
        for expert in range(self._count):
            at = f"{self._prefix}.{expert}"
            for half, name in enumerate(("gate_proj", "up_proj")):
                load = partial(self._load_in, expert, half)
                yield WeightSlot(name=f"{at}.{name}.weight", parameter="gate_up", shape=into, load=load)
            load_down = partial(self._load_down, expert)
            yield WeightSlot(name=f"{at}.down_proj.weight", parameter="down", shape=back, load=load_down)

    def _load_in(self, expert: int, half: int, tensor: torch.Tensor) -> None:
        cut = self._cut
        rows = self.gate_up[expert, half * cut.local : (half + 1) * cut.local]
        rows[: cut.count].copy_(tensor[cut.begin : cut.begin + cut.count])
        rows[cut.count :].zero_()

    def _load_down(self, expert: int, tensor: torch.Tensor) -> None:
        cut = self._cut
        columns = self.down[expert]
        columns[:, : cut.count].copy_(tensor[:, cut.begin : cut.begin + cut.count])
        columns[:, cut.count :].zero_()


class MixtureOfExperts(Layer):
    """``forward(x (T, hidden)) -> (T, hidden)``, a partial sum of group ``moe``: routed experts, and shared ones that every token has, as one gated MLP.

    Args:
        intermediate: of one routed expert; ``shared`` of all shared ones, 0: there are none.
        activation: of all experts.
        bias: the shared ones have biases.

    Raises:
        ModelError: the activation of the routed experts is not SiLU.
    """

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        hidden: int,
        intermediate: int,
        routing: Routing,
        *,
        shared: int = 0,
        activation: str = "silu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        if activation not in ("silu", "swish"):
            raise ModelError(f"experts with activation {activation!r} are not supported (supported: silu)")
        self.gate = ctx.router(f"{prefix}.gate", hidden, routing)
        self.experts = ctx.experts(f"{prefix}.experts", hidden, intermediate, routing)
        self.shared_up: nn.Module | None = None
        if shared:
            at = f"{prefix}.shared_experts"
            self.shared_up = ctx.gated_linear(
                f"{at}.gate_up_proj", hidden, shared, activation=activation, bias=bias, group="moe"
            )
            self.shared_down = ctx.linear(f"{at}.down_proj", shared, hidden, bias=bias, shard="row", group="moe")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x)
        out: torch.Tensor = self.experts(x, weights, chosen)
        if self.shared_up is not None:
            out += self.shared_down(self.shared_up(x))
        return out

"""Mixtures of experts by themselves: groups of experts, sharding, refusals, and whether a graph can hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed.builtin.kernels import moe
from tokenspeed.errors import ModelError
from tokenspeed.layers import MixtureOfExperts, Routing, check_complete, load_weights
from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.moe import Experts
from tokenspeed.layers.parallel import ParallelGroup, ParallelGroups
from tokenspeed.plugins import KernelSpec
from tokenspeed.testing.harness import kernel_registry, run_ranks
from tokenspeed.weights.dummy import dummy_weights

ROUTING = Routing(experts=6, top_k=2, scoring="sigmoid", bias=True, groups=3, kept_groups=2, group_best=2, scale=1.5)
CAPTURES = KernelSpec(
    name="still",
    target="tokenspeed.builtin.kernels.moe:experts",
    family="moe",
    mode="experts",
    features=frozenset({"captures"}),
)


def context(group: ParallelGroup | None = None, *extra: KernelSpec, dtype: torch.dtype = torch.float32) -> LayerContext:
    groups = ParallelGroups({"moe": group}) if group else None
    select: Callable[..., Any] = kernel_registry(*extra).select
    return LayerContext(dtype=dtype, device=torch.device("cpu"), select_kernel=select, groups=groups)


def test_groups_are_kept_by_the_sum_of_their_best_and_experts_by_their_own_score() -> None:
    logits = torch.tensor([[9.0, -9.0, 3.0, 3.0, 2.0, 3.5]])
    # Sums of two sigmoids: 1.0, 1.9, 1.85; the single best expert is in the group that is dropped.
    _, chosen = moe.route(logits, 3, "sigmoid", groups=3, kept_groups=2, group_best=2)
    assert chosen.tolist() == [[5, 2, 3]]
    _, chosen = moe.route(logits, 3, "sigmoid", groups=3, kept_groups=2, group_best=1)
    assert chosen.tolist() == [[0, 5, 4]]


def test_a_token_is_the_weighted_sum_of_its_experts_and_the_shared_ones() -> None:
    layer = MixtureOfExperts(context(), "m", 8, 6, ROUTING, shared=10)
    given = dict(dummy_weights(layer))
    check_complete(layer, load_weights(layer, given.items()))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)) * 20

    def mlp(at: str, row: torch.Tensor) -> torch.Tensor:
        gate, up, down = (given[f"{at}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ row) * (up @ row))

    weights, chosen = layer.gate(x)
    torch.testing.assert_close(weights.sum(dim=-1), torch.full((5,), 1.5))
    expected = [
        sum(w * mlp(f"m.experts.{e}", row) for w, e in zip(ws, es, strict=True)) + mlp("m.shared_experts", row)
        for row, ws, es in zip(x, weights, chosen.tolist(), strict=True)
    ]
    torch.testing.assert_close(layer(x), torch.stack(expected))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_sum_over_ranks_is_the_layer_of_one_rank(ranks: int) -> None:
    """Six elements of an expert over four ranks: the last one has padding alone."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def work(group: ParallelGroup | None) -> torch.Tensor:
        layer = MixtureOfExperts(context(group), "m", 8, 6, ROUTING, shared=6)
        load_weights(layer, dummy_weights(layer))
        out: torch.Tensor = layer(x)
        return out

    torch.testing.assert_close(torch.stack(run_ranks(ranks, work)).sum(dim=0), work(None))


def test_scores_are_fp32_whatever_the_element_type() -> None:
    router = context(dtype=torch.bfloat16).router("gate", 8, ROUTING)
    assert {parameter.dtype for parameter in router.parameters()} == {torch.float32}
    weights, _ = router(torch.randn(3, 8).bfloat16())
    assert weights.dtype is torch.float32


def test_experts_say_whether_a_graph_can_hold_them() -> None:
    assert not made(context()).captures
    assert made(context(None, CAPTURES)).captures


def made(ctx: LayerContext) -> Experts:
    layer = ctx.experts("experts", 8, 6, ROUTING)
    assert isinstance(layer, Experts)
    return layer


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"experts": 6, "top_k": 2, "scoring": "sigmoids"}, "one of softmax, sigmoid, not 'sigmoids'"),
        ({"experts": 6, "top_k": 2, "groups": 4}, "6 experts cannot be cut in 4 equal groups"),
        ({"experts": 6, "top_k": 2, "groups": 3, "kept_groups": 4}, "4 of 3 groups of 2 experts"),
        ({"experts": 6, "top_k": 2, "groups": 6, "group_best": 2}, "by their 2 best are no choice"),
        ({"experts": 6, "top_k": 3, "groups": 3, "kept_groups": 1}, "a token cannot have 3 of 2 experts"),
    ],
)
def test_routing_that_does_not_exist_or_go_together_is_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        context().router("gate", 8, Routing(**numbers))


def test_an_activation_that_no_kernel_of_experts_has_is_refused() -> None:
    with pytest.raises(ModelError, match="experts with activation 'gelu_pytorch_tanh' are not supported"):
        MixtureOfExperts(context(), "m", 8, 6, ROUTING, activation="gelu_pytorch_tanh")

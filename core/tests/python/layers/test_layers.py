"""Layers by themselves: fusing, sharding, padding, reduction, loading, kernels asked for once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tokenspeed.builtin.attention.torch_backend import TorchAttention
from tokenspeed.errors import ModelError, PluginError
from tokenspeed.interfaces.attention import AttentionLayer, LayerKV
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.layers import check_complete, load_weights
from tokenspeed.layers.activation import GatedPair
from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.dtypes import dtype_from_name, short_name
from tokenspeed.layers.linear import Linear
from tokenspeed.layers.module import Layer
from tokenspeed.layers.parallel import ParallelGroup, ParallelGroups
from tokenspeed.layers.quantization import Unquantized, quantization_for
from tokenspeed.plugins import KernelSpec
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.plugins.registry import Contribution
from tokenspeed.plugins.selection import load_target
from tokenspeed.testing.harness import ModelHarness, kernel_registry, run_ranks
from tokenspeed.weights.describe import describe_model

SELECT = kernel_registry().select


def context(
    group: ParallelGroup | None = None, select: Callable[[KernelRequest], Any] = SELECT, **kwargs: Any
) -> LayerContext:
    groups = ParallelGroups(dict.fromkeys(("attn", "dense"), group)) if group else None
    return LayerContext(dtype=torch.float32, device=torch.device("cpu"), select_kernel=select, groups=groups, **kwargs)


def weights(*shapes: tuple[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(*shape, generator=g) for name, shape in shapes}


def test_parts_are_fused_under_their_checkpoint_names() -> None:
    made = context().linear("m.0.attn.qkv", 8, 10, bias=True, parts=(("q", 6), ("k", 4)))
    given = weights(
        ("m.0.attn.q.weight", (6, 8)),
        ("m.0.attn.k.weight", (4, 8)),
        ("m.0.attn.q.bias", (6,)),
        ("m.0.attn.k.bias", (4,)),
    )
    assert load_weights(made, given.items()) == {"weight", "bias"}
    x = torch.randn(3, 8)
    whole = torch.cat((given["m.0.attn.q.weight"], given["m.0.attn.k.weight"]))
    torch.testing.assert_close(
        made(x), functional.linear(x, whole, torch.cat((given["m.0.attn.q.bias"], given["m.0.attn.k.bias"])))
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_column_then_row_is_the_unsharded_pair(ranks: int) -> None:
    """Sizes that no number of ranks divides; the bias of the row shard is added once; the partial sums meet in the norm."""
    given = weights(
        ("up.weight", (10, 6)), ("up.bias", (10,)), ("down.weight", (6, 10)), ("down.bias", (6,)), ("norm.weight", (6,))
    )
    x, residual = torch.randn(4, 6), torch.randn(4, 6)

    def work(group: ParallelGroup) -> tuple[torch.Tensor, torch.Tensor]:
        ctx = context(group)
        up = ctx.linear("up", 6, 10, bias=True, shard="column", units=(5,))
        down = ctx.linear("down", 10, 6, bias=True, shard="row", units=(5,))
        norm = ctx.rms_norm("norm", 6, 1e-5, reduce="dense")
        for layer, names in ((up, "up."), (down, "down."), (norm, "norm.")):
            load_weights(layer, [(name, tensor) for name, tensor in given.items() if name.startswith(names)])
        out: tuple[torch.Tensor, torch.Tensor] = norm(down(up(x)), residual.clone())
        return out

    (expected, expected_residual) = run_ranks(1, work)[0]
    for normed, total in run_ranks(ranks, work):
        torch.testing.assert_close(normed, expected)
        torch.testing.assert_close(total, expected_residual)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_does_not_divide_is_complete_on_every_rank(tied: bool) -> None:
    given = weights(("e.weight", (11, 4)), ("h.weight", (11, 4)), ("h.bias", (11,)))
    ids = torch.tensor([0, 10, 5, 6])

    def work(group: ParallelGroup) -> tuple[torch.Tensor, torch.Tensor]:
        ctx = context(group)
        embedding = ctx.embedding("e", 11, 4)
        head = ctx.lm_head("h", 11, 4, tied=embedding if tied else None, bias=True)
        load_weights(embedding, [("e.weight", given["e.weight"])])
        load_weights(head, [(name, given[name]) for name in (("h.bias",) if tied else ("h.weight", "h.bias"))])
        hidden = embedding(ids)
        return hidden, head(hidden)

    table = given["e.weight"] if tied else given["h.weight"]
    for hidden, logits in run_ranks(2, work):
        torch.testing.assert_close(hidden, given["e.weight"][ids])
        torch.testing.assert_close(logits, functional.linear(given["e.weight"][ids], table, given["h.bias"]))


def test_a_tied_head_has_no_parameter_of_its_own() -> None:
    ctx = context()
    embedding = ctx.embedding("e", 5, 4)
    head = ctx.lm_head("h", 5, 4, tied=embedding)
    assert list(head.parameters()) == []
    with pytest.raises(TypeError, match="tied must be what embedding"):
        ctx.lm_head("h", 5, 4, tied=head)


def test_a_norm_without_residual_hands_its_input_on_as_one() -> None:
    norm = context().rms_norm("n", 4, 1e-5)
    x = torch.randn(2, 4)
    _, residual = norm(x)
    assert residual is x


def fused_spec() -> KernelSpec:
    return KernelSpec(
        name="fused", target="tokenspeed.builtin.kernels.gemm:linear_silu_mul", family="gemm", mode="linear_silu_mul"
    )


@pytest.mark.parametrize("kernels", [(), (fused_spec(),)])
def test_gate_and_up_run_fused_exactly_where_a_kernel_was_made_for_it(kernels: tuple[KernelSpec, ...]) -> None:
    made = context(select=kernel_registry(*kernels).select).gated_linear("mlp.gate_up_proj", 6, 5)
    assert isinstance(made, Linear if kernels else GatedPair)
    given = weights(("mlp.gate_proj.weight", (5, 6)), ("mlp.up_proj.weight", (5, 6)))
    load_weights(made, given.items())
    x = torch.randn(3, 6)
    expected = functional.silu(x @ given["mlp.gate_proj.weight"].T) * (x @ given["mlp.up_proj.weight"].T)
    torch.testing.assert_close(made(x), expected)


def test_a_fused_kernel_that_cannot_run_is_not_replaced_where_it_was_asked_for() -> None:
    """E4: an explicit --kernel for the fused pair fails the start; it never falls back in silence."""
    spec = replace(fused_spec(), dtypes=("bf16",))
    asked = KernelRegistry(
        [Contribution("ours", spec)], platform_name="cpu", overrides={"gemm.linear_silu_mul": "fused"}
    )
    with pytest.raises(PluginError, match="takes bf16, not fp32"):
        context(select=asked.select).gated_linear("mlp.gate_up_proj", 6, 5)


def test_a_fused_kernel_that_cannot_be_loaded_is_replaced_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    broken = replace(fused_spec(), target="tokenspeed.builtin.kernels.gemm:missing")
    made_by = context(select=kernel_registry(broken).select)
    for layer in range(2):
        assert isinstance(made_by.gated_linear(f"mlp.{layer}.gate_up_proj", 6, 5), GatedPair)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "linear_silu_mul" in warning
    assert "missing" in warning


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'relu2' is not supported"):
        context().gated_mlp_activation("relu2")


def test_kernels_are_chosen_when_a_layer_is_made_and_never_in_forward() -> None:
    asked: Counter[str] = Counter()

    def select(request: KernelRequest) -> Any:
        asked[f"{request.family}.{request.mode}"] += 1
        return SELECT(request)

    ctx = context(select=select)
    made = ctx.linear("l", 4, 4)
    norm = ctx.rms_norm("n", 4, 1e-5)
    assert asked == {"gemm.linear": 1, "norm.rms_norm": 1, "norm.add_rms_norm": 1}
    norm(made(torch.randn(2, 4)))
    assert asked.total() == 3


def test_a_kernel_that_no_one_has_fails_at_construction() -> None:
    def select(request: KernelRequest) -> Any:
        raise PluginError(f"no kernel for {request.family}.{request.mode}")

    with pytest.raises(PluginError, match=r"gemm\.linear"):
        context(select=select).linear("l", 4, 4)


def test_backends_are_told_of_every_layer_they_serve_before_the_first_step() -> None:
    told: list[list[AttentionLayer]] = []
    pages: list[int] = []

    class Telling(TorchAttention):
        def bind_layers(self, layers: Sequence[AttentionLayer]) -> None:
            told.append(list(layers))

        def bind_pages(self, pages_of: Sequence[LayerKV]) -> None:
            pages.extend(kv.k.data_ptr() for kv in pages_of)

    made = ModelHarness(load_target("tokenspeed.builtin.toy:ToyForCausalLM"), describe_model("toy"), backend=Telling)
    assert [[layer.index for layer in layers] for layers in told] == [[0, 1]]
    assert pages == [made.cache.layer(index).k.data_ptr() for index in (0, 1)], (
        "so that one that cannot read them says so"
    )


def test_layers_share_a_rotary_table_and_the_engine_bounds_its_length() -> None:
    from tokenspeed.layers import RopeConfig

    ctx = context(max_positions=7)
    made = [
        ctx.attention(
            "a", i, q_heads=2, kv_heads=1, head_dim=8, scale=1.0, rope=RopeConfig(rotary_dim=8, max_position=4096)
        )
        for i in range(2)
    ]
    tables = [layer._cos_sin for layer in made]
    assert tables[0] is tables[1]
    assert tables[0].shape == (7, 8)


def test_weights_are_allocated_under_their_tag() -> None:
    tags: list[str] = []

    def allocate(tag: str) -> Any:
        tags.append(tag)
        return nullcontext()

    context(allocate=allocate).linear("l", 4, 4)
    assert tags == ["weights"]


def test_missing_twice_and_misfit_tensors_are_named() -> None:
    made = context().linear("a.qkv", 8, 10, parts=(("q", 6), ("k", 4)))
    q = ("a.q.weight", torch.zeros(6, 8))
    filled = load_weights(made, [q])
    assert filled == set()  # half of a fused parameter is not the parameter
    with pytest.raises(ModelError, match=r"lacks 2 tensors.*a\.q\.weight, a\.k\.weight"):
        check_complete(made, filled)
    with pytest.raises(ModelError, match=r"holds 'a\.q\.weight' twice"):
        load_weights(made, [q, q])
    with pytest.raises(ModelError, match=r"'a\.q\.weight' has shape \(8, 6\).*\(6, 8\)"):
        load_weights(made, [("a.q.weight", torch.zeros(8, 6))])
    assert load_weights(made, [("other", torch.zeros(1))], ignore=lambda name: name == "other") == set()


@pytest.mark.parametrize("arguments", [{"shard": "diagonal"}, {"parts": (("q", 3),)}])
def test_a_layer_that_contradicts_itself_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"l: "):
        context().linear("l", 4, 4, **arguments)


def test_a_quantised_checkpoint_is_refused_by_its_method() -> None:
    assert isinstance(quantization_for({}), Unquantized)
    with pytest.raises(ModelError, match="'fp8'"):
        quantization_for({"quantization_config": {"quant_method": "fp8"}})


def test_hooks_on_a_layer_still_fire() -> None:
    class Doubles(Layer):
        def forward(self, x: int) -> int:
            return 2 * x

    layer, seen = Doubles(), []
    layer.register_forward_hook(lambda module, args, out: seen.append((args, out)))
    assert layer(4) == 8
    assert seen == [((4,), 8)]


def test_names_of_element_types() -> None:
    assert [short_name(dtype_from_name(name)) for name in ("float32", "bfloat16", "float16")] == [
        "fp32",
        "bf16",
        "fp16",
    ]

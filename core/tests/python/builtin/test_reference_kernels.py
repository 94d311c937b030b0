"""The references pass their own suite (shapes, untouched inputs, repeatability) and agree with independent formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from tokenspeed.builtin.kernels import attention, cache, gemm, norm, rope, sampling
from tokenspeed.builtin.kernels.catalog import REFERENCE_KERNELS
from tokenspeed.interfaces.kernel import FAMILIES, KernelRequest
from tokenspeed.plugins import KernelSpec
from tokenspeed.testing.harness import kernel_registry
from tokenspeed.testing.kernel import KernelSuite
from tokenspeed.testing.kernel_cases import kernel_cases


def suite(spec: KernelSpec) -> type:
    return type(f"Test_{spec.family}_{spec.mode}", (KernelSuite,), {"spec": spec, "__module__": __name__})


for _spec in REFERENCE_KERNELS:
    globals()[f"Test_{_spec.family}_{_spec.mode}"] = suite(_spec)


def test_every_reference_belongs_to_a_known_family_and_has_cases() -> None:
    for spec in REFERENCE_KERNELS:
        assert spec.family in FAMILIES
        assert kernel_cases(spec.family, spec.mode)


def test_a_fused_product_is_only_taken_when_a_kernel_was_made_for_it() -> None:
    registry = kernel_registry()
    request = {"family": "gemm", "mode": "linear_silu_mul", "dtype": "fp32"}
    gates = registry.explain(KernelRequest(**request))
    assert gates == [("builtin:torch", "meant for debug, not latency")]
    assert registry.select(KernelRequest(**request, objective="debug")) is gemm.linear_silu_mul


def test_rms_norm_is_the_textbook_formula() -> None:
    x, weight = torch.randn(4, 10), torch.randn(10)
    expected = torch.stack([row / math.sqrt(sum(v * v for v in row.tolist()) / 10 + 1e-5) * weight for row in x])
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5), expected)


def test_add_rms_norm_returns_the_very_residual_it_was_given() -> None:
    x, residual = torch.ones(1, 4), torch.full((1, 4), 2.0)
    _, out = norm.add_rms_norm(x, residual, torch.ones(4), 1e-6)
    assert out is residual
    assert residual.tolist() == [[3.0, 3.0, 3.0, 3.0]]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_turns_each_pair_by_its_angle(interleaved: bool) -> None:
    angle = 0.7
    table = torch.tensor([[1.0, math.cos(angle), 0.0, math.sin(angle)]])  # two pairs: still, and turned
    q = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    k = q.clone()
    rope.rotate(q, k, torch.tensor([0]), table, 4, interleaved)
    turned = (2, 3) if interleaved else (1, 3)
    a, b = (3.0, 4.0) if interleaved else (2.0, 4.0)
    expected = [1.0, 2.0, 3.0, 4.0]
    expected[turned[0]] = a * math.cos(angle) - b * math.sin(angle)
    expected[turned[1]] = b * math.cos(angle) + a * math.sin(angle)
    torch.testing.assert_close(q, torch.tensor([expected]))
    assert torch.equal(q, k)


def test_written_pages_hold_rotated_keys_and_plain_values_where_they_belong() -> None:
    qkv = torch.arange(2 * 3 * 4, dtype=torch.float32).view(2, 12)
    table = torch.tensor([[1.0, 1.0, 0.0, 0.0]])  # turns nothing
    k_cache, v_cache = torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4)
    q = rope.qkv_rope_write(
        qkv, torch.zeros(2, dtype=torch.int64), table, 1, 1, 4, k_cache, v_cache, torch.tensor([3, -1]), "NHD"
    )
    assert q.flatten(1).tolist() == qkv[:, :4].tolist()
    assert k_cache[1, 1, 0].tolist() == [4, 5, 6, 7]
    assert v_cache[1, 1, 0].tolist() == [8, 9, 10, 11]
    assert k_cache.count_nonzero() == 4  # slot -1 wrote nothing


def test_both_layouts_hold_the_same_tokens() -> None:
    k, v = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    slots = torch.tensor([0, 9, 3, 7, 4])
    nhd, hnd = torch.zeros(2, 5, 2, 8), torch.zeros(2, 2, 5, 8)
    cache.write(k, v, nhd, nhd.clone(), slots, "NHD")
    cache.write(k, v, hnd, hnd.clone(), slots, "HND")
    assert torch.equal(nhd, hnd.transpose(1, 2))


def test_attention_over_pages_is_attention_over_the_gathered_sequence() -> None:
    torch.manual_seed(0)
    length, heads, dim = 11, 2, 8
    k, v, q = torch.randn(length, heads, dim), torch.randn(length, heads, dim), torch.randn(length, heads, dim)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    caches = [torch.zeros(4, 4, heads, dim), torch.zeros(4, 4, heads, dim)]
    slots = torch.tensor([table[0, i // 4].item() * 4 + i % 4 for i in range(length)])
    cache.write(k, v, *caches, slots, "NHD")
    got = attention.extend(q, *caches, table, torch.tensor([length]), torch.tensor([0, length]), dim**-0.5, "NHD")
    expected = functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True
    ).transpose(0, 1)
    torch.testing.assert_close(got, expected)


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    q, cell = torch.zeros(1, 1, 2), torch.ones(1, 1, 1, 2)
    out = attention.decode(
        q, cell, cell, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1]), 1, 1.0, "NHD", sinks=torch.zeros(1)
    )
    assert out.flatten().tolist() == [0.5, 0.5]  # the key and the sink weigh the same


def test_a_row_without_tokens_yields_zeros() -> None:
    q, cell = torch.ones(1, 1, 2), torch.full((1, 1, 1, 2), float("nan"))
    out = attention.decode(q, cell, cell, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0]), 1, 1.0, "NHD")
    assert out.flatten().tolist() == [0.0, 0.0]


def test_argmax_takes_the_lowest_index_and_marks_rows_with_nan() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 9.0, 1.0], [float("-inf")] * 3])
    assert sampling.argmax(logits).tolist() == [1, -1, 0]


def test_a_bitmask_denies_tokens_of_its_rows_alone() -> None:
    logits = torch.zeros(3, 34)
    bits = torch.tensor([[-(2**31), 1], [-1, -1]], dtype=torch.int32)
    sampling.apply_bitmask(logits, bits, torch.tensor([2, 0]))
    assert torch.isfinite(logits[2]).nonzero()[:, 0].tolist() == [31, 32]
    assert torch.equal(logits[:2], torch.zeros(2, 34))

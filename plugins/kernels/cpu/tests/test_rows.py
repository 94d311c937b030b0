"""Norms, activations, embedding, argmax."""

from __future__ import annotations

import pytest
import torch
from tokenspeed_plugin_kernels_cpu.runtime import Runtime

DTYPES = [torch.float32, torch.bfloat16]


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    narrow = out.dtype is torch.bfloat16
    torch.testing.assert_close(
        out.double(), expected.double(), atol=1e-3 if narrow else 2e-6, rtol=8e-3 if narrow else 2e-6
    )


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (5, 17), (300, 576), (2, 3, 130)])
def test_rms_norm(runtime: Runtime, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    for weight in (torch.randn(shape[-1]), torch.randn(shape[-1]).bfloat16()):
        out = runtime.rms_norm(x, weight, 1e-5)
        assert out.dtype is dtype
        close(out, rms(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (7, 33), (200, 576)])
def test_add_rms_norm_adds_in_place_and_norms_the_rounded_sum(
    runtime: Runtime, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    total = x + residual
    out, same = runtime.add_rms_norm(x, residual, weight, 1e-6)
    assert same is residual
    assert torch.equal(residual, total)
    close(out, rms(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (1, 3072), (9, 34), (100, 3072), (2, 2, 20)])
def test_gated_activations(runtime: Runtime, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 6).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    close(runtime.silu_and_mul(x), torch.nn.functional.silu(gate) * up)
    out = runtime.gelu_tanh_and_mul(x)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(
        out.double(),
        expected,
        atol=2e-5 if dtype is torch.float32 else 2e-2,
        rtol=1e-5 if dtype is torch.float32 else 1e-2,
    )


def test_silu_at_the_ends_of_the_range(runtime: Runtime) -> None:
    """Large negative gates give 0 without underflow traps, large ones pass through, NaN stays NaN."""
    gate = torch.tensor([-1e30, -200.0, -90.0, -87.0, 87.0, 90.0, 1e30, float("nan")])
    out = runtime.silu_and_mul(torch.cat([gate, torch.ones(8)])[None])[0]
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), atol=1e-30, rtol=2e-6, equal_nan=True)


def test_lookup(runtime: Runtime) -> None:
    for dtype in DTYPES:
        weight = torch.randn(50, 33).to(dtype)
        for ids in (
            torch.tensor([0, 49, 3, 3]),
            torch.randint(0, 50, (700,), dtype=torch.int32),
            torch.empty(0, dtype=torch.int64),
        ):
            assert torch.equal(runtime.lookup(ids, weight), weight[ids.long()])
    with pytest.raises(IndexError, match="token id 50 at index 1 is outside the vocabulary of 50"):
        runtime.lookup(torch.tensor([1, 50]), weight)
    with pytest.raises(IndexError, match="token id -1"):
        runtime.lookup(torch.tensor([-1]), weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_takes_the_lowest_of_ties(runtime: Runtime, dtype: torch.dtype) -> None:
    for rows, vocab in [(1, 1), (3, 5), (1, 49152), (4, 20011)]:
        logits = torch.randn(rows, vocab).to(dtype)
        top = logits.max(dim=1, keepdim=True).values
        expected = torch.stack([(row == best).nonzero()[0, 0] for row, best in zip(logits, top, strict=True)])
        assert torch.equal(runtime.argmax(logits), expected)
    tied = torch.zeros(2, 30000)
    tied[0, [9000, 20001]] = 1.0
    assert runtime.argmax(tied).tolist() == [9000, 0]
    assert runtime.argmax(torch.randn(4, 100)[:, 10:20]).shape == (4,)


def test_argmax_reports_nan_rows_and_masked_rows(runtime: Runtime) -> None:
    for vocab in (3, 100, 16391):
        logits = torch.randn(3, vocab)
        logits[1, vocab - 1] = float("nan")
        logits[2] = float("-inf")
        logits[0, 2] = float("inf")
        assert runtime.argmax(logits).tolist() == [2, -1, 0]


def test_misfits_are_named(runtime: Runtime) -> None:
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match="size of x's last axis"):
        runtime.rms_norm(x, torch.randn(7), 1e-5)
    with pytest.raises(ValueError, match="residual must be contiguous"):
        runtime.add_rms_norm(x, x.T.contiguous(), torch.randn(8), 1e-5)
    with pytest.raises(ValueError, match=r"\(\.\.\., 2 I\)"):
        runtime.silu_and_mul(torch.randn(2, 3))
    with pytest.raises(ValueError, match="contiguous along V"):
        runtime.argmax(x.T)
    with pytest.raises(ValueError, match="ids must be"):
        runtime.lookup(torch.ones(2), x)

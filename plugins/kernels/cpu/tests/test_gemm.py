from __future__ import annotations

import itertools

import pytest
import torch
from tokenspeed_plugin_kernels_cpu.runtime import Runtime

SHAPES = [
    (1, 1, 1),
    (1, 9, 7),
    (2, 8, 16),
    (3, 17, 33),
    (5, 24, 64),
    (7, 31, 100),
    (8, 960, 576),
    (33, 40, 1536),
    (130, 72, 641),
    (260, 13, 576),
]


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def tolerance(dtype: torch.dtype, k: int) -> float:
    return 3e-6 * k**0.5 if dtype is torch.float32 else 0.01 * k**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_linear_equals_the_float64_product(runtime: Runtime, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    for b in (None, bias):
        out = runtime.linear(x, weight, b)
        assert out.dtype is dtype
        torch.testing.assert_close(
            out.double(),
            reference(x, weight, b),
            atol=tolerance(dtype, k),
            rtol=1e-5 if dtype is torch.float32 else 8e-3,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_silu_mul_equals_the_two_steps(runtime: Runtime, dtype: torch.dtype) -> None:
    for rows, n, k in [(1, 12, 40), (6, 100, 576), (200, 33, 96)]:
        x, weight, bias = (
            torch.randn(rows, k).to(dtype),
            torch.randn(2 * n, k).to(dtype) / k**0.5,
            torch.randn(2 * n).to(dtype),
        )
        gate, up = reference(x, weight, bias).chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
        out = runtime.linear_silu_mul(x, weight, bias)
        torch.testing.assert_close(
            out.double(),
            expected,
            atol=1e-5 if dtype is torch.float32 else 1e-3,
            rtol=1e-5 if dtype is torch.float32 else 2e-2,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [576, 1536])
def test_a_row_does_not_depend_on_the_number_of_rows(runtime: Runtime, dtype: torch.dtype, k: int) -> None:
    """Batch invariance: each row alone gives bit for bit what it gives in any batch, at any place, on any thread."""
    x, weight = torch.randn(300, k).to(dtype), torch.randn(77, k).to(dtype)
    whole = runtime.linear(x, weight)
    for rows in (1, 2, 3, 4, 5, 8, 17, 33, 64, 128):
        assert torch.equal(runtime.linear(x[300 - rows :], weight), whole[300 - rows :])
    for _ in range(3):
        assert torch.equal(runtime.linear(x, weight), whole)


def test_strided_rows_and_outputs(runtime: Runtime) -> None:
    """x may be a slice of wider rows and out a slice of wider rows; what lies beside them is not touched."""
    wide = torch.randn(9, 100)
    weight = torch.randn(21, 48)
    out = torch.full((9, 40), 7.0)
    result = runtime.linear(wide[:, 10:58], weight, out=out[:, 5:26])
    torch.testing.assert_close(result, wide[:, 10:58] @ weight.T, atol=1e-4, rtol=1e-4)
    assert torch.equal(out[:, :5], torch.full((9, 5), 7.0))
    assert torch.equal(out[:, 26:], torch.full((9, 14), 7.0))


def test_logits_may_be_float32_beside_bfloat16(runtime: Runtime) -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(50, 64).bfloat16()
    out = runtime.linear(x, weight, out=torch.empty(3, 50))
    torch.testing.assert_close(out.double(), reference(x, weight, None), atol=1e-4, rtol=1e-4)


def test_no_rows_give_no_rows(runtime: Runtime) -> None:
    assert runtime.linear(torch.empty(0, 16), torch.randn(4, 16)).shape == (0, 4)


def test_nan_and_infinity_pass_through(runtime: Runtime) -> None:
    """A bad row stays bad, and does not spread to its neighbours in the tile."""
    x = torch.randn(5, 32)
    x[2, 3] = float("nan")
    x[4, 0] = float("inf")
    out = runtime.linear(x, torch.randn(11, 32))
    assert out[2].isnan().all()
    assert not out[4].isfinite().any()
    assert out[[0, 1, 3]].isfinite().all()


def test_misfits_are_named(runtime: Runtime) -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    bad: list[tuple[tuple[object, ...], str]] = [
        ((x, torch.randn(4, 7)), "same K"),
        ((x, weight.bfloat16()), "must both be float32 or both bfloat16"),
        ((x.half(), weight.half()), "must both be float32 or both bfloat16"),
        ((x.T, torch.randn(4, 2)), "contiguous along K"),
        ((x, torch.randn(8, 4).T), "contiguous with the same K"),
        ((x, weight, torch.randn(5)), "bias"),
        ((x, weight, None, torch.empty(3, 4)), r"out must be \(2, 4\)"),
    ]
    for arguments, message in bad:
        with pytest.raises(ValueError, match=message):
            runtime.linear(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as many gate rows as up rows"):
        runtime.linear_silu_mul(x, torch.randn(5, 8))


def test_odd_sizes(runtime: Runtime) -> None:
    """Every tail of rows, weight rows and depth around the vector and tile sizes."""
    for rows, n, k in itertools.product((1, 4, 6), (1, 7, 9), (3, 8, 15, 17, 31, 65)):
        x, weight = torch.randn(rows, k), torch.randn(n, k)
        torch.testing.assert_close(runtime.linear(x, weight), x @ weight.T, atol=2e-5, rtol=1e-4)

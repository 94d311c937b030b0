"""Matrix products with weights as they lie in the checkpoint (C++: ``kernels_gemm.h``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenspeed_plugin_kernels_cpu.runtime import IS_BF16, Runtime, refuse, runtime_of

if TYPE_CHECKING:
    import torch
    from tokenspeed.interfaces.kernel import KernelContext

__all__ = ["Gemm", "make_linear", "make_linear_silu_mul"]


class Gemm:
    """Products over one runtime. A row's result is bitwise the same for every number of rows and every thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._linear = runtime.linear

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x @ weight.T + bias``: x (T, K), row stride allowed; weight (N, K); bias (N); out (T, N), row stride allowed.

        float32 or bfloat16, all alike; ``out`` may be float32 beside bfloat16 inputs (logits). Sums are fp32.
        Raises ``ValueError`` naming what does not fit.
        """
        return self._product(x, weight, bias, out, False)

    def linear_silu_mul(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``silu(x @ gate.T) * (x @ up.T)``: weight (2 N, K) = [gate; up]; bias (2 N); out (T, N). Otherwise as ``linear``."""
        return self._product(x, weight, bias, out, True)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, silu_mul: bool
    ) -> torch.Tensor:
        dtype = x.dtype
        bf16 = IS_BF16.get(dtype)
        if bf16 is None or weight.dtype is not dtype or x.dim() != 2 or weight.dim() != 2 or not (x.is_cpu and weight.is_cpu):
            refuse("gemm.linear", "x (T, K) and weight (N, K) must both be float32 or both bfloat16 on the CPU", x=x, weight=weight)
        rows, k = x.shape
        n, weight_k = weight.shape
        ldx, inner = x.stride()
        if k != weight_k or (inner != 1 and k > 1) or not weight.is_contiguous() or k == 0:
            refuse("gemm.linear", "x (T, K) must be contiguous along K and weight (N, K) contiguous with the same K > 0", x=x, weight=weight)
        bias_address = 0
        if bias is not None:
            if bias.dtype is not dtype or bias.shape != (n,) or not bias.is_contiguous():
                refuse("gemm.linear", "bias must be contiguous, of x's type and one for each row of weight", bias=bias, weight=weight)
            bias_address = bias.data_ptr()
        if silu_mul:
            if n % 2:
                refuse("gemm.linear_silu_mul", "weight must hold as many gate rows as up rows", weight=weight)
            n //= 2
        out_bf16: bool | None = bf16
        ldo = n
        if out is None:
            out = x.new_empty((rows, n))
        else:
            out_bf16 = IS_BF16.get(out.dtype)
            if out_bf16 is None or (out_bf16 and not bf16) or out.shape != (rows, n) or (n > 1 and out.stride(1) != 1):
                refuse("gemm.linear", f"out must be ({rows}, {n}), contiguous along the last axis, float32 or x's type", out=out, x=x)
            ldo = out.stride(0)
        self._linear(x.data_ptr(), ldx, rows, weight.data_ptr(), n, k, bias_address, out.data_ptr(), ldo, bf16, out_bf16, silu_mul)
        return out


def make_linear(context: KernelContext) -> Callable[..., torch.Tensor]:
    """Factory of ``gemm.linear``."""
    return Gemm(runtime_of(context)).linear


def make_linear_silu_mul(context: KernelContext) -> Callable[..., torch.Tensor]:
    """Factory of ``gemm.linear_silu_mul``."""
    return Gemm(runtime_of(context)).linear_silu_mul

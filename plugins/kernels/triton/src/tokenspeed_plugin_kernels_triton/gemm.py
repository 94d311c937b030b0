"""Matrix products of few rows (1 to 64): the weights are read once, at memory speed.

Two kernels. ``_gemv`` multiplies and adds in registers for one row. ``_small_m`` feeds the tensor cores with the weight tile as the
wide operand and the activation rows padded to 16, 32 or 64. Both may split K; the pieces of an output tile are summed in order of the split
by the program that arrives last, so results do not depend on timing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_plugin_kernels_triton.activation import silu_and_mul
from tokenspeed_plugin_kernels_triton.early import early_launch
from tokenspeed_plugin_kernels_triton.tuning import GATED, MAX_ROWS, GemmConfig, gemm_config

if TYPE_CHECKING:
    from tokenspeed.interfaces.kernel import KernelContext

__all__ = ["GatedLinear", "Linear", "SmallGemm", "linear", "linear_silu_mul"]


@triton.jit
def _store_or_reduce(acc, out_ptr, part_ptr, count_ptr, tile, pid_k, offs, mask, elements, SPLIT_K: tl.constexpr):
    """Write one finished tile, or park a piece and let the last arrival sum all pieces in order."""
    if SPLIT_K == 1:
        tl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(part_ptr + pid_k * elements + offs, acc, mask=mask)
        tl.debug_barrier()
        arrived = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel")
        if arrived == SPLIT_K - 1:
            total = tl.zeros_like(acc)
            for k in range(SPLIT_K):
                total += tl.load(part_ptr + k * elements + offs, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=mask)
            tl.atomic_xchg(count_ptr + tile, 0)


@triton.jit
def _weights(rows, cols, offs_n, N, k_to, EVEN: tl.constexpr):
    """A tile of weight rows."""
    if EVEN:
        w = tl.load(rows + cols[None, :], cache_modifier=".cg")
    else:
        w = tl.load(rows + cols[None, :], mask=(offs_n[:, None] < N) & (cols[None, :] < k_to), other=0.0)
    return w.to(tl.float32)


@triton.jit
def _row(x_ptr, cols, k_to, EVEN: tl.constexpr):
    """A stretch of the one activation row."""
    x = tl.load(x_ptr + cols) if EVEN else tl.load(x_ptr + cols, mask=cols < k_to, other=0.0)
    return x.to(tl.float32)[None, :]


@triton.jit
def _gemv(
    x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, count_ptr, N, K,
    HAS_BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT_K: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: weight has N gate rows, then N up rows; the output is silu(gate) * up. The first tile of weights is under way before ``x`` is complete."""
    pid_n, pid_k = tl.program_id(0), tl.program_id(1)
    offs_n = pid_n * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    k_per = tl.cdiv(tl.cdiv(K, BK), SPLIT_K) * BK
    k_from = pid_k * k_per
    k_to = tl.minimum(k_from + k_per, K)
    rows = w_ptr + offs_n[:, None].to(tl.int64) * K
    up_rows = rows + N.to(tl.int64) * K
    w = _weights(rows, k_from + offs_k, offs_n, N, k_to, EVEN)
    if GATED:
        u = _weights(up_rows, k_from + offs_k, offs_n, N, k_to, EVEN)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = _row(x_ptr, k_from + offs_k, k_to, EVEN)
    acc = w * x
    if GATED:
        up = u * x
    for k in range(k_from + BK, k_to, BK):
        x = _row(x_ptr, k + offs_k, k_to, EVEN)
        acc += _weights(rows, k + offs_k, offs_n, N, k_to, EVEN) * x
        if GATED:
            up += _weights(up_rows, k + offs_k, offs_n, N, k_to, EVEN) * x
    y = tl.sum(acc, axis=1)
    if HAS_BIAS and pid_k == 0:
        y += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    if GATED:
        z = tl.sum(up, axis=1)
        if HAS_BIAS:
            z += tl.load(bias_ptr + N + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        y = y * tl.sigmoid(y) * z
    _store_or_reduce(y, out_ptr, part_ptr, count_ptr, pid_n, pid_k, offs_n, offs_n < N, N, SPLIT_K)


@triton.jit(do_not_specialize=["M"])
def _small_m(
    x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, count_ptr, M, N, K, stride_x,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT_K: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pid_n, pid_k = tl.program_id(0), tl.program_id(1)
    offs_n = pid_n * BN + tl.arange(0, BN)
    offs_m = tl.arange(0, BM)
    offs_k = tl.arange(0, BK)
    k_per = tl.cdiv(tl.cdiv(K, BK), SPLIT_K) * BK
    k_from = pid_k * k_per
    k_to = tl.minimum(k_from + k_per, K)
    w_rows = w_ptr + offs_n[:, None].to(tl.int64) * K
    x_rows = x_ptr + offs_m[None, :] * stride_x
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for k in range(k_from, k_to, BK):
        cols = k + offs_k
        if EVEN:
            w = tl.load(w_rows + cols[None, :])
            x = tl.load(x_rows + cols[:, None], mask=offs_m[None, :] < M, other=0.0)
        else:
            w = tl.load(w_rows + cols[None, :], mask=(offs_n[:, None] < N) & (cols[None, :] < k_to), other=0.0)
            x = tl.load(x_rows + cols[:, None], mask=(offs_m[None, :] < M) & (cols[:, None] < k_to), other=0.0)
        acc = tl.dot(w, x, acc)
    if HAS_BIAS and pid_k == 0:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[:, None]
    offs = offs_m[None, :] * N + offs_n[:, None]
    mask = (offs_n[:, None] < N) & (offs_m[None, :] < M)
    _store_or_reduce(acc, out_ptr, part_ptr, count_ptr, pid_n, pid_k, offs, mask, M * N, SPLIT_K)


class SmallGemm:
    """Launches the two kernels and owns the split-K workspace of one device.

    Args:
        device: where the workspace lives.
        max_elements: fp32 elements of the workspace; a call that would need more runs without splitting.
    """

    def __init__(self, device: torch.device, max_elements: int = 1 << 23) -> None:
        self._parts = torch.empty(max_elements, dtype=torch.float32, device=device)
        self._counts = torch.zeros(1 << 16, dtype=torch.int32, device=device)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        config: GemmConfig | None = None,
        *,
        gated: bool = False,
    ) -> torch.Tensor:
        """``x @ weight.T + bias``; x (M, K) with unit column stride, weight (N, K) contiguous, out (M, N) of x's dtype. With ``gated``, of one
        row alone, the first half of the product goes through silu and is multiplied with the second: out (1, N / 2)."""
        m, k = x.shape
        n = weight.shape[0] // 2 if gated else weight.shape[0]
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
        cfg = config or (GATED if gated else gemm_config(m, n, k))
        split = cfg.split_k if cfg.split_k * m * n <= self._parts.numel() else 1
        even = n % cfg.bn == 0 and k % (cfg.bk * split) == 0
        grid = (triton.cdiv(n, cfg.bn), split)
        common: dict[str, Any] = {
            "HAS_BIAS": bias is not None,
            "BN": cfg.bn,
            "BK": cfg.bk,
            "SPLIT_K": split,
            "EVEN": even,
            "num_warps": cfg.warps,
            "num_stages": cfg.stages,
            **early_launch(x),
        }
        b = bias if bias is not None else x
        if cfg.bm == 1:
            _gemv[grid](x, weight, b, out, self._parts, self._counts, n, k, GATED=gated, **common)
        else:
            _small_m[grid](x, weight, b, out, self._parts, self._counts, m, n, k, x.stride(0), BM=cfg.bm, **common)
        return out


class Linear:
    """Kernel ``gemm.linear``: few rows run here, many in the vendor's library."""

    def __init__(self, small: SmallGemm) -> None:
        self._small = small

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``; x (T, K) with unit column stride, weight (N, K) contiguous, out (T, N)."""
        if x.shape[0] > MAX_ROWS or x.dtype == torch.float32:
            # fp32 products must not be rounded to tf32, which the tensor cores would do.
            return torch.nn.functional.linear(x, weight, bias)
        return self._small(x, weight, bias)


class GatedLinear:
    """Kernel ``gemm.linear_silu_mul``: one pass for a single row. For more rows a product and an activation are faster: two accumulators of tensor core
    tiles leave too few loads in flight."""

    def __init__(self, small: SmallGemm) -> None:
        self._small = small
        self._linear = Linear(small)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``silu(x @ gate.T) * (x @ up.T)``; weight (2 I, K) has the gate's rows before the up rows, out (T, I)."""
        if x.shape[0] > 1 or x.dtype == torch.float32:
            return silu_and_mul(self._linear(x, weight, bias))
        return self._small(x, weight, bias, gated=True)


def _shared(ctx: KernelContext) -> SmallGemm:
    """The split-K workspace of the rank, shared by all its layers."""
    small = ctx.shared.get("small_gemm")
    if not isinstance(small, SmallGemm):
        small = ctx.shared["small_gemm"] = SmallGemm(ctx.device)
    return small


def linear(ctx: KernelContext) -> Linear:
    """Factory of kernel ``gemm.linear``."""
    return Linear(_shared(ctx))


def linear_silu_mul(ctx: KernelContext) -> GatedLinear:
    """Factory of kernel ``gemm.linear_silu_mul``."""
    return GatedLinear(_shared(ctx))

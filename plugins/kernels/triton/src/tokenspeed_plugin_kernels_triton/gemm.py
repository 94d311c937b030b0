"""Matrix products of few rows (1 to 32): the weights are read once, at memory speed.

One row is multiplied in registers (``gemv``). For more, ``_small_m`` feeds the tensor cores with the weight tile as the wide operand and the activation rows
padded to 16, 32 or 64. K may be split; the pieces of an output tile are summed in order of the split by the program that arrives last.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_plugin_kernels_triton.activation import silu_and_mul
from tokenspeed_plugin_kernels_triton.early import early_launch, prefetch_lines
from tokenspeed_plugin_kernels_triton.gemv import gemv, gemv_rows
from tokenspeed_plugin_kernels_triton.limits import shared_memory_limit
from tokenspeed_plugin_kernels_triton.splitk import store_or_reduce
from tokenspeed_plugin_kernels_triton.tuning import MAX_ROWS, GemmConfig, load_tuning

if TYPE_CHECKING:
    from tokenspeed.interfaces.kernel import KernelContext

__all__ = ["GatedLinear", "Linear", "SmallGemm", "linear", "linear_silu_mul"]

_log = logging.getLogger(__name__)


@triton.jit(do_not_specialize=["M"])
def _small_m(
    x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, count_ptr, M, N, K, stride_x,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT_K: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """FIRST: so many tiles of weights are asked of memory before the rows are complete; they wait in the L2 cache."""
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
        for tile in tl.static_range(FIRST):
            lines = (k_from + tile * BK + tl.arange(0, BK // 64) * 64)[None, :]
            prefetch_lines(w_rows + lines, (offs_n[:, None] < N) & (lines < k_to))
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
    store_or_reduce(acc, out_ptr, part_ptr, count_ptr, pid_n, pid_k, offs, mask, M * N, SPLIT_K)


def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program of the device may have, by which Triton refuses a launch."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


class SmallGemm:
    """Launches the kernels and owns the split-K workspace of one device.

    Args:
        device: where the workspace lives.
        max_elements: fp32 elements of the workspace; a call that would need more runs without splitting.
        tiles: a file of ``tokenspeed tune-gemm`` for this device, or empty for the package's.
    """

    def __init__(self, device: torch.device, max_elements: int = 1 << 23, tiles: str = "") -> None:
        self._parts = torch.empty(max_elements, dtype=torch.float32, device=device)
        self._counts = torch.zeros(1 << 16, dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if on_gpu else ""
        self.tuning = load_tuning(name, _shared_memory(device) if on_gpu else shared_memory_limit(()), tiles)
        if on_gpu and not self.tuning.device:
            _log.info("products of few rows: no tiles were searched on %s; `tokenspeed tune-gemm` searches them", name)
        elif on_gpu and triton.__version__ not in self.tuning.evidence:
            _log.info(
                "products of few rows: tiles searched %s, here with triton %s", self.tuning.evidence, triton.__version__
            )
        #: multiprocessors, whose number says how many programs can run at once
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2

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
        cfg = config or self.tuning.gemm(m, weight.shape[0], k, gated)
        split = cfg.split_k if cfg.split_k * m * n <= self._parts.numel() else 1
        even = n % cfg.bn == 0 and k % (cfg.bk * split) == 0
        grid = (triton.cdiv(n, cfg.bn), split)
        common: dict[str, Any] = {"HAS_BIAS": bias is not None, "BN": cfg.bn, "num_warps": cfg.warps, **early_launch(x)}
        b = bias if bias is not None else x
        if cfg.programs:
            width = triton.next_power_of_2(k)
            gemv_rows[(min(grid[0], cfg.programs * self._processors),)](
                x, weight, b, out, n, k, BK=width, GATED=gated, **common
            )
            return out
        common |= {"BK": cfg.bk, "SPLIT_K": split, "EVEN": even}
        if cfg.bm == 1:
            gemv[grid](
                x, weight, b, out, self._parts, self._counts, n, k,
                GATED=gated, STAGES=cfg.stages, AHEAD=cfg.ahead > 0, **common,
            )  # fmt: skip
        else:
            _small_m[grid](
                x, weight, b, out, self._parts, self._counts, m, n, k, x.stride(0),
                BM=cfg.bm, FIRST=cfg.ahead, num_stages=cfg.stages, **common,
            )  # fmt: skip
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
        small = ctx.shared["small_gemm"] = SmallGemm(ctx.device, tiles=str(ctx.options.get("tiles", "")))
    return small


def linear(ctx: KernelContext) -> Linear:
    """Factory of kernel ``gemm.linear``."""
    return Linear(_shared(ctx))


def linear_silu_mul(ctx: KernelContext) -> GatedLinear:
    """Factory of kernel ``gemm.linear_silu_mul``."""
    return GatedLinear(_shared(ctx))

"""One row times a weight: multiplied and added in registers, as fast as the weights can be read.

What decides is how many loads are under way, from the first moment on. Three schedules, all of which begin to read weights before the row is complete:

* ``_gemv`` with one tile a row of K, or with tiles that the compiler's pipeline copies ahead (``STAGES``);
* the same with ``AHEAD``: the next tile is read into registers before the present one is multiplied;
* ``_gemv_rows``: a fixed number of programs a multiprocessor keep the whole row in registers and walk over the weight's rows, one tile ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_plugin_kernels_triton.splitk import store_or_reduce

__all__ = ["gemv", "gemv_rows"]


@triton.jit
def _weights(rows, cols, offs_n, N, k_to, EVEN: tl.constexpr):
    """A tile of weight rows, as stored."""
    if EVEN:
        w = tl.load(rows + cols[None, :], cache_modifier=".cg")
    else:
        w = tl.load(rows + cols[None, :], mask=(offs_n[:, None] < N) & (cols[None, :] < k_to), other=0.0)
    return w


@triton.jit
def _row(x_ptr, cols, k_to, EVEN: tl.constexpr):
    """A stretch of the one activation row."""
    x = tl.load(x_ptr + cols) if EVEN else tl.load(x_ptr + cols, mask=cols < k_to, other=0.0)
    return x.to(tl.float32)[None, :]


@triton.jit
def gemv(
    x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, count_ptr, N, K,
    HAS_BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT_K: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """GATED: weight has N gate rows, then N up rows; the output is silu(gate) * up."""
    pid_n, pid_k = tl.program_id(0), tl.program_id(1)
    offs_n = pid_n * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    k_per = tl.cdiv(tl.cdiv(K, BK), SPLIT_K) * BK
    k_from = pid_k * k_per
    k_to = tl.minimum(k_from + k_per, K)
    rows = w_ptr + offs_n[:, None].to(tl.int64) * K
    up_rows = rows + N.to(tl.int64) * K
    w = _weights(rows, k_from + offs_k, offs_n, N, k_to, EVEN)
    u = w
    if GATED:
        u = _weights(up_rows, k_from + offs_k, offs_n, N, k_to, EVEN)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if AHEAD:
        acc = tl.zeros((BN, BK), dtype=tl.float32)
        up = tl.zeros((BN, BK), dtype=tl.float32)
        last = k_from + (tl.cdiv(k_to - k_from, BK) - 1) * BK
        for k in range(k_from, last, BK):
            next_w = _weights(rows, k + BK + offs_k, offs_n, N, k_to, EVEN)
            x = _row(x_ptr, k + offs_k, k_to, EVEN)
            acc += w.to(tl.float32) * x
            if GATED:
                next_u = _weights(up_rows, k + BK + offs_k, offs_n, N, k_to, EVEN)
                up += u.to(tl.float32) * x
                u = next_u
            w = next_w
        x = _row(x_ptr, last + offs_k, k_to, EVEN)
        acc += w.to(tl.float32) * x
        if GATED:
            up += u.to(tl.float32) * x
    else:
        x = _row(x_ptr, k_from + offs_k, k_to, EVEN)
        acc = w.to(tl.float32) * x
        up = acc
        if GATED:
            up = u.to(tl.float32) * x
        for k in tl.range(k_from + BK, k_to, BK, num_stages=STAGES):
            x = _row(x_ptr, k + offs_k, k_to, EVEN)
            acc += _weights(rows, k + offs_k, offs_n, N, k_to, EVEN).to(tl.float32) * x
            if GATED:
                up += _weights(up_rows, k + offs_k, offs_n, N, k_to, EVEN).to(tl.float32) * x
    y = tl.sum(acc, axis=1)
    if HAS_BIAS and pid_k == 0:
        y += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    if GATED:
        z = tl.sum(up, axis=1)
        if HAS_BIAS:
            z += tl.load(bias_ptr + N + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        y = y * tl.sigmoid(y) * z
    store_or_reduce(y, out_ptr, part_ptr, count_ptr, pid_n, pid_k, offs_n, offs_n < N, N, SPLIT_K)


@triton.jit
def gemv_rows(
    x_ptr, w_ptr, bias_ptr, out_ptr, N, K,
    HAS_BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p computes tiles p, p + programs, ... of ``BN`` rows; ``BK`` is K filled up to a power of two."""
    pid, step = tl.program_id(0), tl.num_programs(0)
    offs_k = tl.arange(0, BK)
    inside = offs_k[None, :] < K
    tile = tl.arange(0, BN)
    tiles = tl.cdiv(N, BN)
    up_rows = w_ptr + N.to(tl.int64) * K
    offs_n = pid * BN + tile
    at = offs_n[:, None].to(tl.int64) * K + offs_k[None, :]
    w = tl.load(w_ptr + at, mask=inside & (offs_n[:, None] < N), other=0.0, cache_modifier=".cg")
    u = w
    if GATED:
        u = tl.load(up_rows + at, mask=inside & (offs_n[:, None] < N), other=0.0, cache_modifier=".cg")
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)[None, :]
    for n in range(pid, tiles, step):
        offs_n = (n + step) * BN + tile
        at = offs_n[:, None].to(tl.int64) * K + offs_k[None, :]
        next_w = tl.load(w_ptr + at, mask=inside & (offs_n[:, None] < N), other=0.0, cache_modifier=".cg")
        next_u = next_w
        if GATED:
            next_u = tl.load(up_rows + at, mask=inside & (offs_n[:, None] < N), other=0.0, cache_modifier=".cg")
        out_n = n * BN + tile
        y = tl.sum(w.to(tl.float32) * x, axis=1)
        if HAS_BIAS:
            y += tl.load(bias_ptr + out_n, mask=out_n < N, other=0.0).to(tl.float32)
        if GATED:
            z = tl.sum(u.to(tl.float32) * x, axis=1)
            if HAS_BIAS:
                z += tl.load(bias_ptr + N + out_n, mask=out_n < N, other=0.0).to(tl.float32)
            y = y * tl.sigmoid(y) * z
        tl.store(out_ptr + out_n, y.to(out_ptr.dtype.element_ty), mask=out_n < N)
        w = next_w
        u = next_u

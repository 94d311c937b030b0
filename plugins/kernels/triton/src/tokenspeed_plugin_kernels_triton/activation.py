"""Gated activations of a fused gate-up product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_plugin_kernels_triton.early import early_launch

__all__ = ["gelu_tanh_and_mul", "silu_and_mul"]


@triton.jit
def _gated(x_ptr, out_ptr, width, total, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < total
    row = offs // width
    src = row * width + offs
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(x_ptr + src, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + src + width, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # tanh(z) = 2 sigmoid(2 z) - 1 (Hendrycks and Gimpel 2016, tanh form)
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        act = gate * tl.sigmoid(2.0 * z)
    else:
        act = gate * tl.sigmoid(gate)
    tl.store(out_ptr + offs, (act * up).to(out_ptr.dtype.element_ty), mask=mask)


def _launch(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    rows, double = gate_up.shape
    width = double // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    total = rows * width
    if total:
        block = 256 if total < 1 << 18 else 1024
        _gated[(triton.cdiv(total, block),)](
            gate_up, out, width, total, GELU=gelu, BLOCK=block, num_warps=4, **early_launch(out)
        )
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``; gate_up (T, 2 I) -> (T, I)."""
    return _launch(gate_up, False)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with the tanh form; gate_up (T, 2 I) -> (T, I)."""
    return _launch(gate_up, True)

"""Root-mean-square norms, one program a row, computed in fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_plugin_kernels_triton.early import early_launch

__all__ = ["add_rms_norm", "rms_norm"]


@triton.jit
def _rms_norm(
    x_ptr, res_ptr, w_ptr, out_ptr, H, stride_x, eps, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < H
    w = tl.load(w_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        # The residual is rounded to its own type before the norm reads it, as the reference does.
        x += tl.load(res_ptr + row * H + offs, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(res_ptr.dtype.element_ty)
        tl.store(res_ptr + row * H + offs, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
    tl.store(out_ptr + row * H + offs, (x * scale * w).to(out_ptr.dtype.element_ty), mask=mask)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(hidden)
        warps = min(16, max(1, block // 512))
        _rms_norm[(rows,)](
            x, out if residual is None else residual, weight, out, hidden, x.stride(0), eps,
            ADD=residual is not None, BLOCK=block, num_warps=warps, **early_launch(x),
        )  # fmt: skip
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of x (T, H), row stride allowed; weight (H)."""
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual += x`` in place, then the norm of residual; both (T, H)."""
    return _launch(x, residual, weight, eps), residual

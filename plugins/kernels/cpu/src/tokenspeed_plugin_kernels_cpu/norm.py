"""RMS norms (C++: ``kernels_rows.h``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tokenspeed_plugin_kernels_cpu.runtime import IS_BF16, Runtime, refuse, runtime_of

if TYPE_CHECKING:
    import torch
    from tokenspeed.interfaces.kernel import KernelContext

__all__ = ["Norm", "make_add_rms_norm", "make_rms_norm"]


class Norm:
    """Norms over one runtime; arithmetic is fp32, results are rounded to x's type."""

    def __init__(self, runtime: Runtime) -> None:
        self._norm = runtime.norm

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / sqrt(mean(x * x) + eps) * weight``: x (..., H) contiguous, weight (H), float32 or bfloat16 each."""
        bf16, weight_bf16, hidden = self._check("norm.rms_norm", x, weight)
        out = x.new_empty(x.shape)
        self._norm(x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), x.numel() // hidden, hidden, eps, bf16, weight_bf16)
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual += x`` in place; returns (its norm, residual). x and residual (..., H) contiguous and alike."""
        bf16, weight_bf16, hidden = self._check("norm.add_rms_norm", x, weight)
        if residual.shape != x.shape or residual.dtype is not x.dtype or not residual.is_contiguous():
            refuse("norm.add_rms_norm", "residual must be contiguous and of x's shape and type", x=x, residual=residual)
        out = x.new_empty(x.shape)
        rows = x.numel() // hidden
        self._norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, hidden, eps, bf16, weight_bf16)
        return out, residual

    @staticmethod
    def _check(kernel: str, x: torch.Tensor, weight: torch.Tensor) -> tuple[bool, bool, int]:
        bf16 = IS_BF16.get(x.dtype)
        weight_bf16 = IS_BF16.get(weight.dtype)
        if bf16 is None or weight_bf16 is None or not (x.is_cpu and x.is_contiguous() and weight.is_contiguous()):
            refuse(kernel, "x and weight must be contiguous float32 or bfloat16 tensors on the CPU", x=x, weight=weight)
        hidden = weight.numel()
        if x.dim() < 1 or x.shape[-1] != hidden or weight.dim() != 1 or hidden == 0:
            refuse(kernel, "weight (H) must have the size of x's last axis", x=x, weight=weight)
        return bf16, weight_bf16, hidden


def make_rms_norm(context: KernelContext) -> Callable[..., torch.Tensor]:
    """Factory of ``norm.rms_norm``."""
    return Norm(runtime_of(context)).rms_norm


def make_add_rms_norm(context: KernelContext) -> Callable[..., Any]:
    """Factory of ``norm.add_rms_norm``."""
    return Norm(runtime_of(context)).add_rms_norm

"""Root-mean-square norms."""

from __future__ import annotations

import torch

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (..., H) scaled to unit root mean square (in fp32, rounded to x's type) and multiplied by weight (H)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual += x`` in place; returns (its norm, residual)."""
    residual += x
    return rms_norm(residual, weight, eps), residual

"""Matrix products with a weight."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["linear", "linear_silu_mul"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``: x (T, K), weight (N, K), bias (N) -> (T, N)."""
    return functional.linear(x, weight, bias)


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` with weight (2 I, K) = [gate; up] -> (T, I)."""
    gate, up = functional.linear(x, weight, bias).float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)

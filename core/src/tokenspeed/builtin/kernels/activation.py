"""Gated activations over (T, 2 I), gate first."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["gelu_tanh_and_mul", "silu_and_mul"]


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` -> (T, I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate, tanh approximation) * up`` -> (T, I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up

"""Gated activations."""

from __future__ import annotations

import torch
from torch import nn

from tokenspeed.errors import ModelError
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.layers.quantization import SelectKernel

__all__ = ["GatedActivation", "activation_mode"]

_MODES = {"silu": "silu_and_mul", "swish": "silu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}


def activation_mode(name: str) -> str:
    """Kernel mode for a config's ``hidden_act``. Raises ``ModelError`` for one that is not known."""
    mode = _MODES.get(name)
    if mode is None:
        raise ModelError(f"activation {name!r} is not supported (supported: {', '.join(_MODES)})")
    return mode


class GatedActivation(nn.Module):
    """``forward(gate_up (T, 2 I)) -> (T, I)``."""

    def __init__(self, name: str, *, dtype: str, select: SelectKernel) -> None:
        super().__init__()
        self._kernel = select(KernelRequest(family="activation", mode=activation_mode(name), dtype=dtype))

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._kernel(gate_up)
        return out

"""Gated activations."""

from __future__ import annotations

import torch
from torch import nn

from tokenspeed.errors import ModelError
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.layers.module import Layer
from tokenspeed.layers.quantization import SelectKernel

__all__ = ["GatedActivation", "GatedPair", "activation_mode"]

_MODES = {"silu": "silu_and_mul", "swish": "silu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}


def activation_mode(name: str) -> str:
    """Kernel mode for a config's ``hidden_act``. Raises ``ModelError`` for one that is not known."""
    mode = _MODES.get(name)
    if mode is None:
        raise ModelError(f"activation {name!r} is not supported (supported: {', '.join(_MODES)})")
    return mode


class GatedActivation(Layer):
    """``forward(gate_up (T, 2 I)) -> (T, I)``."""

    def __init__(self, name: str, *, dtype: str, select: SelectKernel) -> None:
        super().__init__()
        self._kernel = select(KernelRequest(family="activation", mode=activation_mode(name), dtype=dtype))

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._kernel(gate_up)
        return out


class GatedPair(Layer):
    """A fused gate and up projection and its activation, one after the other: ``forward(x (T, in)) -> (T, I)``."""

    def __init__(self, gate_up: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.gate_up, self.activation = gate_up, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.activation(self.gate_up(x))
        return out

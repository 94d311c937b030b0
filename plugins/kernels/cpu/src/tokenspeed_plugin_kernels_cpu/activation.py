"""Gated activations (C++: ``kernels_rows.h``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenspeed_plugin_kernels_cpu.runtime import IS_BF16, Runtime, refuse, runtime_of

if TYPE_CHECKING:
    import torch
    from tokenspeed.interfaces.kernel import KernelContext

__all__ = ["Activation", "make_gelu_tanh_and_mul", "make_silu_and_mul"]


class Activation:
    """Activations over one runtime: gate_up (..., 2 I) contiguous, float32 or bfloat16 -> (..., I); arithmetic is fp32."""

    def __init__(self, runtime: Runtime) -> None:
        self._gated = runtime.gated

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` with gate the first half of the last axis. Raises ``ValueError`` for a tensor that does not fit."""
        return self._apply("activation.silu_and_mul", gate_up, False)

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up`` with the tanh approximation of gelu. Raises ``ValueError`` for a tensor that does not fit."""
        return self._apply("activation.gelu_tanh_and_mul", gate_up, True)

    def _apply(self, kernel: str, gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
        bf16 = IS_BF16.get(gate_up.dtype)
        shape = gate_up.shape
        if bf16 is None or not (gate_up.is_cpu and gate_up.is_contiguous()) or len(shape) < 1 or shape[-1] % 2 or shape[-1] == 0:
            refuse(kernel, "gate_up must be contiguous float32 or bfloat16 (..., 2 I) on the CPU", gate_up=gate_up)
        width = shape[-1] // 2
        out = gate_up.new_empty((*shape[:-1], width))
        self._gated(gate_up.data_ptr(), out.data_ptr(), out.numel() // width, width, bf16, gelu)
        return out


def make_silu_and_mul(context: KernelContext) -> Callable[..., torch.Tensor]:
    """Factory of ``activation.silu_and_mul``."""
    return Activation(runtime_of(context)).silu_and_mul


def make_gelu_tanh_and_mul(context: KernelContext) -> Callable[..., torch.Tensor]:
    """Factory of ``activation.gelu_tanh_and_mul``."""
    return Activation(runtime_of(context)).gelu_tanh_and_mul

"""Greedy choice (C++: ``kernels_rows.h``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tokenspeed_plugin_kernels_cpu.runtime import IS_BF16, Runtime, refuse, runtime_of

if TYPE_CHECKING:
    from tokenspeed.interfaces.kernel import KernelContext

__all__ = ["Sampling", "make_argmax"]


class Sampling:
    """Sampling kernels over one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._argmax = runtime.argmax

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Index of the largest of each row of logits (R, V), row stride allowed -> (R) int64; the lowest index wins a tie, a NaN row is -1."""
        bf16 = IS_BF16.get(logits.dtype)
        if bf16 is None or logits.dim() != 2 or not logits.is_cpu or logits.shape[1] == 0 or logits.stride(1) != 1:
            refuse("sampling.argmax", "logits must be float32 or bfloat16 (R, V > 0) on the CPU, contiguous along V", logits=logits)
        rows, vocab = logits.shape
        out = torch.empty(rows, dtype=torch.int64)
        self._argmax(logits.data_ptr(), rows, logits.stride(0), vocab, bf16, out.data_ptr())
        return out


def make_argmax(context: KernelContext) -> Callable[..., torch.Tensor]:
    """Factory of ``sampling.argmax``."""
    return Sampling(runtime_of(context)).argmax

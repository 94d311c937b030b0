"""Embedding lookup (C++: ``runtime.cpp``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenspeed_plugin_kernels_cpu.runtime import IS_BF16, IS_INT64, Runtime, refuse, runtime_of

if TYPE_CHECKING:
    import torch
    from tokenspeed.interfaces.kernel import KernelContext

__all__ = ["Embedding", "make_lookup"]


class Embedding:
    """Lookups over one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._lookup = runtime.lookup

    def lookup(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Rows of weight (V, H) at ids (T) int32 or int64 -> (T, H). Raises ``IndexError`` for an id outside the vocabulary."""
        wide = IS_INT64.get(ids.dtype)
        if wide is None or ids.dim() != 1 or not (ids.is_contiguous() and weight.is_contiguous()):
            refuse("embedding.lookup", "ids must be contiguous int32 or int64 (T,), weight contiguous", ids=ids, weight=weight)
        if weight.dtype not in IS_BF16 or weight.dim() != 2 or not weight.is_cpu:
            refuse("embedding.lookup", "weight must be float32 or bfloat16 (V, H) on the CPU", weight=weight)
        count = ids.shape[0]
        vocab, hidden = weight.shape
        out = weight.new_empty((count, hidden))
        self._lookup(ids.data_ptr(), wide, count, weight.data_ptr(), vocab, hidden * weight.element_size(), out.data_ptr())
        return out


def make_lookup(context: KernelContext) -> Callable[..., torch.Tensor]:
    """Factory of ``embedding.lookup``."""
    return Embedding(runtime_of(context)).lookup

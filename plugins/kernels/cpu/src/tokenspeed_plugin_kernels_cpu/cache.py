"""Writes into the paged cache (C++: ``kernels_rows.h``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tokenspeed_plugin_kernels_cpu.runtime import IS_BF16, Runtime, check_cache, refuse, runtime_of

if TYPE_CHECKING:
    from tokenspeed.interfaces.kernel import KernelContext

__all__ = ["Cache", "make_write"]


class Cache:
    """Cache writes over one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._write = runtime.cache_write

    def write(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, layout: str
    ) -> None:
        """Put k (T, Hk, D) and v (T, Hk, Dv), row strides allowed, at slot_mapping (T) int64 = page * page_size + offset; -1 = skip.

        The cache may be of the other float type. Raises ``ValueError`` for what does not fit, ``IndexError`` for a slot out of range.
        """
        pages, page_size, heads, key_dim, value_dim, hnd, cache_bf16 = check_cache("cache.write", k_cache, v_cache, layout)
        tokens = k.shape[0]
        bf16 = IS_BF16.get(k.dtype)
        if bf16 is None or v.dtype is not k.dtype or not k.is_cpu or k.shape != (tokens, heads, key_dim) or v.shape != (tokens, heads, value_dim):
            refuse("cache.write", f"k must be (T, {heads}, {key_dim}) and v (T, {heads}, {value_dim}), both float32 or both bfloat16", k=k, v=v)
        if k.stride()[1:] != (key_dim, 1) or v.stride()[1:] != (value_dim, 1):
            refuse("cache.write", "the heads of a token must be contiguous", k=k, v=v)
        if slot_mapping.dtype is not torch.int64 or slot_mapping.shape != (tokens,) or not slot_mapping.is_contiguous():
            refuse("cache.write", f"slot_mapping must be contiguous int64 ({tokens},)", slot_mapping=slot_mapping)
        self._write(
            k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), tokens, bf16, k_cache.data_ptr(), v_cache.data_ptr(), pages, page_size,
            heads, key_dim, value_dim, hnd, cache_bf16, slot_mapping.data_ptr(),
        )  # fmt: skip


def make_write(context: KernelContext) -> Callable[..., None]:
    """Factory of ``cache.write``."""
    return Cache(runtime_of(context)).write

"""The native runtime of a rank, and the checks that every wrapper shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from tokenspeed_plugin_kernels_cpu._native import Runtime, supported_isas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenspeed.interfaces.kernel import KernelContext

__all__ = ["IS_BF16", "IS_INT64", "Runtime", "check_cache", "refuse", "runtime_of", "supported_isas"]

#: Element types that the kernels take, and whether they are the narrow one.
IS_BF16 = {torch.float32: False, torch.bfloat16: True}
IS_INT64 = {torch.int32: False, torch.int64: True}

_SHARED_KEY = "kernels-cpu"


def runtime_of(context: KernelContext) -> Runtime:
    """The rank's runtime: made for the first kernel that asks, shared by all, its threads end with ``context.shared``."""
    runtime = context.shared.get(_SHARED_KEY)
    if not isinstance(runtime, Runtime):
        runtime = Runtime(max(1, context.threads), str(context.options.get("isa", "")))
        context.shared[_SHARED_KEY] = runtime
    return runtime


def refuse(kernel: str, rule: str, **tensors: torch.Tensor | None) -> NoReturn:
    """Raise ``ValueError`` with the rule that does not hold and what was given."""
    given = "; ".join(
        f"{name} is {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} with strides {t.stride()} on {t.device}"
        for name, t in tensors.items()
        if t is not None
    )
    raise ValueError(f"{kernel}: {rule}. Given: {given}")


def check_cache(kernel: str, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: str) -> tuple[int, int, int, int, int, bool, bool]:
    """(pages, page size, kv heads, key dim, value dim, is HND, is bf16) of a cache pair."""
    hnd = layout == "HND"
    if not hnd and layout != "NHD":
        raise ValueError(f"{kernel}: layout is {layout!r}; it must be 'HND' or 'NHD'")
    shape: Sequence[int] = k_cache.shape
    if len(shape) != 4 or v_cache.shape[:-1] != shape[:-1] or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        refuse(kernel, "k_cache and v_cache must be contiguous, four-dimensional, and alike but for the last size", k_cache=k_cache, v_cache=v_cache)
    bf16 = IS_BF16.get(k_cache.dtype)
    if bf16 is None or v_cache.dtype is not k_cache.dtype or not k_cache.is_cpu:
        refuse(kernel, "k_cache and v_cache must both be float32 or bfloat16 on the CPU", k_cache=k_cache, v_cache=v_cache)
    if hnd:
        pages, heads, page_size, dim = shape
    else:
        pages, page_size, heads, dim = shape
    return pages, page_size, heads, dim, v_cache.shape[3], hnd, bf16

"""The end of a product whose K was cut in pieces."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["store_or_reduce"]


@triton.jit
def store_or_reduce(acc, out_ptr, part_ptr, count_ptr, tile, pid_k, offs, mask, elements, SPLIT_K: tl.constexpr):
    """Write one finished tile, or park a piece and let the last arrival sum all pieces in order: results do not depend on timing."""
    if SPLIT_K == 1:
        tl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(part_ptr + pid_k * elements + offs, acc, mask=mask)
        tl.debug_barrier()
        arrived = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel")
        if arrived == SPLIT_K - 1:
            total = tl.zeros_like(acc)
            for k in range(SPLIT_K):
                total += tl.load(part_ptr + k * elements + offs, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=mask)
            tl.atomic_xchg(count_ptr + tile, 0)

"""Writes of keys and values into pages, and embedding rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_plugin_kernels_triton.rope import cache_strides, stored

__all__ = ["lookup", "write"]


@triton.jit
def _write(
    k_ptr, v_ptr, kc_ptr, vc_ptr, slot_ptr, heads, s_k, s_v, page_size, s_page, s_pos, s_head, v_page, v_pos, v_head,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        h = tl.arange(0, BH)[:, None]
        d = tl.arange(0, BD)[None, :]
        page, offset = slot // page_size, slot % page_size
        k_mask = (h < heads) & (d < D)
        k = tl.load(k_ptr + token * s_k + h * D + d, mask=k_mask)
        tl.store(
            kc_ptr + page * s_page + offset * s_pos + h * s_head + d, stored(k, kc_ptr.dtype.element_ty), mask=k_mask
        )
        v_mask = (h < heads) & (d < DV)
        v = tl.load(v_ptr + token * s_v + h * DV + d, mask=v_mask)
        tl.store(
            vc_ptr + page * v_page + offset * v_pos + h * v_head + d, stored(v, vc_ptr.dtype.element_ty), mask=v_mask
        )


def write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: str,
) -> None:
    """k (T, Hk, D) and v (T, Hk, Dv), each with contiguous heads, go to the pages of ``slot_mapping`` (T); -1 writes nothing."""
    tokens, heads, dim = k.shape
    if tokens == 0:
        return
    page_size, s_page, s_pos, s_head = cache_strides(k_cache, layout)
    _, v_page, v_pos, v_head = cache_strides(v_cache, layout)
    _write[(tokens,)](
        k, v, k_cache, v_cache, slot_mapping, heads, k.stride(0), v.stride(0), page_size, s_page, s_pos, s_head, v_page, v_pos, v_head,
        D=dim, DV=v.shape[2], BD=triton.next_power_of_2(max(dim, v.shape[2])), BH=triton.next_power_of_2(heads), num_warps=4,
    )  # fmt: skip


@triton.jit
def _lookup(ids_ptr, w_ptr, out_ptr, H, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + token).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + token * H + offs, tl.load(w_ptr + row * H + offs, mask=offs < H), mask=offs < H)


def lookup(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows ``ids`` (T) of ``weight`` (V, H) -> (T, H)."""
    hidden = weight.shape[1]
    out = torch.empty((ids.shape[0], hidden), dtype=weight.dtype, device=weight.device)
    if ids.shape[0]:
        block = min(1024, triton.next_power_of_2(hidden))
        _lookup[(ids.shape[0], triton.cdiv(hidden, block))](ids, weight, out, hidden, BLOCK=block, num_warps=4)
    return out

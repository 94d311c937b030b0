"""Head norm, rotary embedding, the split of gates and the write into pages, in one pass over the fused QKV rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_plugin_kernels_triton.early import early_launch

__all__ = ["cache_strides", "qkv_rope_write", "stored"]


@triton.jit
def stored(x, to: tl.constexpr):
    """``x`` as pages of type ``to`` hold it: fp8 saturates at its largest value, 448; NaN stays NaN."""
    if to == tl.float8e4nv:
        wide = x.to(tl.float32)
        x = tl.where(wide > 448.0, 448.0, tl.where(wide < -448.0, -448.0, wide))
    return x.to(to)


@triton.jit
def _qkv(
    qkv_ptr, pos_ptr, cs_ptr, q_out_ptr, gate_ptr, k_ptr, v_ptr, slot_ptr, qn_ptr, kn_ptr,
    q_heads, kv_heads, stride_qkv, page_size, s_page, s_pos, s_head, eps,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, D: tl.constexpr, RD: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr,
    GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile is BH heads of one token, each as two halves of the rotation, columns [0, HALF) and their partners. GATE: behind each query head stands its
    gate, which goes to ``gate_ptr`` as it is."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    lane = tl.arange(0, HALF)
    half: tl.constexpr = RD // 2
    # Rotating lanes pair (i, i + RD/2) or (2i, 2i+1); the rest of the head, D - RD wide, is paired arbitrarily and passes through.
    rot = lane < half
    if INTERLEAVED:
        c1 = tl.where(rot, 2 * lane, lane + half)
        c2 = tl.where(rot, 2 * lane + 1, lane + D // 2)
    else:
        c1 = tl.where(rot, lane, lane + half)
        c2 = tl.where(rot, lane + half, lane + D // 2)
    live = lane < D // 2
    total = q_heads + 2 * kv_heads
    mask = (heads[:, None] < total) & live[None, :]
    places = heads
    if GATE:
        places = heads + tl.minimum(heads, q_heads)
    base = qkv_ptr + token * stride_qkv + places[:, None] * D
    is_q = heads < q_heads
    is_v = heads >= q_heads + kv_heads
    pos = tl.load(pos_ptr + token)
    cos = tl.load(cs_ptr + pos * RD + lane, mask=rot, other=1.0)
    sin = tl.load(cs_ptr + pos * RD + half + lane, mask=rot, other=0.0)
    slot = tl.load(slot_ptr + token)
    if NORM:
        q1 = tl.load(qn_ptr + c1, mask=live, other=0.0).to(tl.float32)
        q2 = tl.load(qn_ptr + c2, mask=live, other=0.0).to(tl.float32)
        k1 = tl.load(kn_ptr + c1, mask=live, other=0.0).to(tl.float32)
        k2 = tl.load(kn_ptr + c2, mask=live, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x1 = tl.load(base + c1[None, :], mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(base + c2[None, :], mask=mask, other=0.0).to(tl.float32)
    if GATE:
        g_mask = mask & is_q[:, None]
        g_base = gate_ptr + (token * q_heads + heads[:, None]) * D
        tl.store(g_base + c1[None, :], tl.load(base + D + c1[None, :], mask=g_mask, other=0.0), mask=g_mask)
        tl.store(g_base + c2[None, :], tl.load(base + D + c2[None, :], mask=g_mask, other=0.0), mask=g_mask)
    if NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / D + eps)
        n1 = x1 * scale[:, None] * tl.where(is_q[:, None], q1[None, :], k1[None, :])
        n2 = x2 * scale[:, None] * tl.where(is_q[:, None], q2[None, :], k2[None, :])
        # The norm's output is rounded to the model's type, as separate kernels would leave it.
        n1 = n1.to(qkv_ptr.dtype.element_ty).to(tl.float32)
        n2 = n2.to(qkv_ptr.dtype.element_ty).to(tl.float32)
        x1 = tl.where(is_v[:, None], x1, n1)
        x2 = tl.where(is_v[:, None], x2, n2)
    y1 = tl.where(is_v[:, None], x1, x1 * cos[None, :] - x2 * sin[None, :])
    y2 = tl.where(is_v[:, None], x2, x2 * cos[None, :] + x1 * sin[None, :])
    q_mask = mask & is_q[:, None]
    q_base = q_out_ptr + (token * q_heads + heads[:, None]) * D
    tl.store(q_base + c1[None, :], y1.to(q_out_ptr.dtype.element_ty), mask=q_mask)
    tl.store(q_base + c2[None, :], y2.to(q_out_ptr.dtype.element_ty), mask=q_mask)
    page, offset = slot // page_size, slot % page_size
    row = page * s_page + offset * s_pos
    written = (slot + 0 * heads) >= 0  # one flag a head: a scalar flag does not broadcast under the interpreter
    # Rounded to the model's type before that of the pages, as separate kernels would.
    y1 = y1.to(q_out_ptr.dtype.element_ty)
    y2 = y2.to(q_out_ptr.dtype.element_ty)
    k_head = heads - q_heads
    k_mask = mask & ((k_head >= 0) & (k_head < kv_heads) & written)[:, None]
    k_base = k_ptr + row + k_head[:, None] * s_head
    tl.store(k_base + c1[None, :], stored(y1, k_ptr.dtype.element_ty), mask=k_mask)
    tl.store(k_base + c2[None, :], stored(y2, k_ptr.dtype.element_ty), mask=k_mask)
    v_head = k_head - kv_heads
    v_mask = mask & ((v_head >= 0) & written)[:, None]
    v_base = v_ptr + row + v_head[:, None] * s_head
    tl.store(v_base + c1[None, :], stored(y1, v_ptr.dtype.element_ty), mask=v_mask)
    tl.store(v_base + c2[None, :], stored(y2, v_ptr.dtype.element_ty), mask=v_mask)


def cache_strides(cache: torch.Tensor, layout: str) -> tuple[int, int, int, int]:
    """(page_size, page stride, position stride, head stride) in elements of a paged cache tensor."""
    if layout == "HND":
        return cache.shape[2], cache.stride(0), cache.stride(2), cache.stride(1)
    return cache.shape[1], cache.stride(0), cache.stride(1), cache.stride(2)


def qkv_rope_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: str,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    gate: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Signature of ``rope.qkv_rope_write``; k_cache and v_cache share strides."""
    tokens = qkv.shape[0]
    q = torch.empty((tokens, q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    gates = torch.empty_like(q) if gate else q
    if tokens == 0:
        return (q, gates) if gate else q
    page_size, s_page, s_pos, s_head = cache_strides(k_cache, layout)
    block = 4 if tokens < 64 else 16
    norm = q_norm is not None
    _qkv[(tokens, triton.cdiv(q_heads + 2 * kv_heads, block))](
        qkv, positions, cos_sin, q, gates, k_cache, v_cache, slot_mapping, q_norm if norm else qkv, k_norm if norm else qkv,
        q_heads, kv_heads, qkv.stride(0), page_size, s_page, s_pos, s_head, eps,
        NORM=norm, INTERLEAVED=interleaved, D=head_dim, RD=cos_sin.shape[1], HALF=triton.next_power_of_2(head_dim // 2), BH=block, GATE=gate,
        num_warps=1 if block == 4 else 4, **early_launch(q),
    )  # fmt: skip
    return (q, gates) if gate else q

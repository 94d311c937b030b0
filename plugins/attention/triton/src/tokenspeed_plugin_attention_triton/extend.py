"""Causal attention of prefill chunks over paged KV, portable: one program a block of query tokens of one row and head (FlashAttention-2, Dao 2023)."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["extend_blocks"]


@triton.jit
def extend_blocks(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_ptr, start_ptr, block_ptr, out_ptr, sink_ptr,
    q_heads, table_stride, s_page, s_pos, s_head, v_page, v_pos, v_head, scale, softcap, window,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """``block_ptr`` (blocks, 2) int32 names (row, first query token within the row) of each program."""
    LOG2E: tl.constexpr = 1.4426950408889634
    block, q_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(block_ptr + block * 2)
    first = tl.load(block_ptr + block * 2 + 1)
    begin = tl.load(start_ptr + row)
    length = tl.load(start_ptr + row + 1) - begin
    context = tl.load(seq_ptr + row) - length
    head = q_head // G
    m = first + tl.arange(0, BM)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    live = m < length
    q_row = (begin + m).to(tl.int64) * q_heads + q_head
    q = tl.load(q_ptr + q_row[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    limit = context + m + 1
    end = context + tl.minimum(first + BM, length)
    kv_begin = 0
    if WINDOW:
        kv_begin = tl.maximum(context + first + 1 - window, 0) // BN * BN
    top = tl.full((BM,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, BDV), dtype=tl.float32)
    for start in range(kv_begin, end, BN):
        pos = start + tl.arange(0, BN)
        there = pos < end
        page = tl.load(table_ptr + row.to(tl.int64) * table_stride + pos // PAGE, mask=there, other=0).to(tl.int64)
        k = tl.load(
            k_ptr + page[None, :] * s_page + (pos % PAGE)[None, :] * s_pos + head * s_head + d[:, None],
            mask=there[None, :] & (d < D)[:, None],
            other=0.0,
        )
        v = tl.load(
            v_ptr + page[:, None] * v_page + (pos % PAGE)[:, None] * v_pos + head * v_head + dv[None, :],
            mask=there[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        s = tl.dot(q, k.to(q.dtype)) * scale
        if SOFTCAP:
            s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)
        s = s * LOG2E
        seen = pos[None, :] < limit[:, None]
        if WINDOW:
            seen = seen & (pos[None, :] >= limit[:, None] - window)
        s = tl.where(seen, s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, axis=1)
        acc = acc * fade[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype))
        top = new_top
    if SINKS:
        sink = tl.load(sink_ptr + q_head) * LOG2E
        whole = tl.maximum(top, sink)
        fade = tl.exp2(top - whole)
        acc = acc * (fade / (total * fade + tl.exp2(sink - whole)))[:, None]
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + q_row[:, None] * DV + dv[None, :], acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :])

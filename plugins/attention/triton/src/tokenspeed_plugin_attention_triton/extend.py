"""Causal attention of prefill chunks over paged KV, portable: one program a block of query tokens of one row and head (FlashAttention-2, Dao 2023)."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["extend_blocks"]


@triton.jit
def _fold(s, v, q, top, total, acc):
    """One block of scores (base 2, dropped ones -inf) and values into the running maximum, sum and accumulator."""
    new_top = tl.maximum(top, tl.max(s, axis=1))
    # A row that has seen nothing yet keeps its maximum at -inf; subtracting 0 instead keeps NaN out.
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(p, axis=1)
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit(do_not_specialize_on_alignment=["table_ptr", "seq_ptr", "start_ptr", "block_ptr"])
def extend_blocks(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_ptr, start_ptr, block_ptr, out_ptr, sink_ptr,
    q_heads, table_stride, s_page, s_pos, s_head, v_page, v_pos, v_head, scale, softcap, window,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, IN_PAGE: tl.constexpr,
):  # fmt: skip
    """``block_ptr`` (blocks, 2) int32 names (row, first query token within the row) of each program, row -1 for nothing to do.

    IN_PAGE: BN divides PAGE, so a block lies in one page.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    q_head, block = tl.program_id(0), tl.program_id(1)
    row = tl.load(block_ptr + block * 2)
    if row < 0:
        return
    first = tl.load(block_ptr + block * 2 + 1)
    begin = tl.load(start_ptr + row)
    length = tl.load(start_ptr + row + 1) - begin
    context = tl.load(seq_ptr + row) - length
    head = q_head // G
    m = first + tl.arange(0, BM)
    n = tl.arange(0, BN)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    live = m < length
    q_row = (begin + m).to(tl.int64) * q_heads + q_head
    q = tl.load(q_ptr + q_row[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    limit = context + m + 1
    end = context + tl.minimum(first + BM, length)
    table = table_ptr + row.to(tl.int64) * table_stride
    k_base, v_base = k_ptr + head * s_head, v_ptr + head * v_head
    kv_begin = 0
    top = tl.full((BM,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, BDV), dtype=tl.float32)
    plain: tl.constexpr = IN_PAGE and BD == D and BDV == DV and not WINDOW and not SOFTCAP
    if plain:
        # Every token of the block sees all of these: no masks.
        factor = scale * LOG2E
        kv_begin = (context + first + 1) // BN * BN
        following = tl.load(table).to(tl.int64)
        for start in range(0, kv_begin, BN):
            page = following  # loaded a block ahead: the loads of keys and values must not wait for it
            following = tl.load(table + tl.minimum(start + BN, end - 1) // PAGE).to(tl.int64)
            inner = start % PAGE + n
            k = tl.load(k_base + page * s_page + inner[None, :] * s_pos + d[:, None])
            s = tl.dot(q, k.to(q.dtype), input_precision="ieee") * factor
            v = tl.load(v_base + page * v_page + inner[:, None] * v_pos + dv[None, :])
            top, total, acc = _fold(s, v, q, top, total, acc)
    if WINDOW:
        lowest = tl.maximum(context + first + 1 - window, 0)
        kv_begin = lowest // BN * BN
    for start in range(kv_begin, end, BN):
        pos = start + n
        there = pos < end
        if WINDOW:
            # Behind the window pages may be others' by now, and a weight of zero makes nothing of what is not a number.
            there = there & (pos >= lowest)
        if IN_PAGE:
            one = tl.load(table + start // PAGE).to(tl.int64)
            inner = start % PAGE + n
            k_at = k_base + one * s_page + inner[None, :] * s_pos + d[:, None]
            v_at = v_base + one * v_page + inner[:, None] * v_pos + dv[None, :]
        else:
            page = tl.load(table + pos // PAGE, mask=there, other=0).to(tl.int64)
            k_at = k_base + page[None, :] * s_page + (pos % PAGE)[None, :] * s_pos + d[:, None]
            v_at = v_base + page[:, None] * v_page + (pos % PAGE)[:, None] * v_pos + dv[None, :]
        k = tl.load(k_at, mask=there[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(v_at, mask=there[:, None] & (dv < DV)[None, :], other=0.0)
        s = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if SOFTCAP:
            s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)
        seen = pos[None, :] < limit[:, None]
        if WINDOW:
            seen = seen & (pos[None, :] >= limit[:, None] - window)
        s = tl.where(seen, s * LOG2E, -float("inf"))
        top, total, acc = _fold(s, v, q, top, total, acc)
    if SINKS:
        sink = tl.load(sink_ptr + q_head) * LOG2E
        whole = tl.maximum(top, sink)
        fade = tl.exp2(top - whole)
        acc = acc * (fade / (total * fade + tl.exp2(sink - whole)))[:, None]
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_ptr + q_row[:, None] * DV + dv[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=live[:, None] & (dv < DV)[None, :],
    )

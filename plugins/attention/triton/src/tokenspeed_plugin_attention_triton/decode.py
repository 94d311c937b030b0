"""Decode attention over paged KV by work items: a stretch of KV tokens read once for one or many rows, then a merge by log-sum-exp.

An item is ``(table_row, row_begin, rows, kv_begin, kv_end, part_base, own, 0)`` int32. Its query tile holds ``rows * width * group`` vectors, where
``group`` is the number of query heads that share one KV head. A row whose whole context is one item is written directly; the pieces of the others
are kept in fp32 with their running maximum and sum (base 2) and merged by ``_merge``. Splitting KV follows Flash-Decoding (Dao et al., 2023); reading a
common prefix once for all rows that share it follows Hydragen (Juravsky et al., 2024).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["ITEM_FIELDS", "decode_items", "merge_parts"]

ITEM_FIELDS = 8


@triton.jit(do_not_specialize_on_alignment=["table_ptr", "seq_ptr", "item_ptr", "count_ptr"])
def decode_items(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_ptr, item_ptr, count_ptr, parts_ptr, out_ptr, acc_ptr, ml_ptr, sink_ptr,
    q_heads, kv_heads, table_stride, s_page, s_pos, s_head, v_page, v_pos, v_head, scale, softcap, window,
    W: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, IN_PAGE: tl.constexpr,
):  # fmt: skip
    """Persistent programs walk over (item, kv head); BM >= rows * W * G of every item. IN_PAGE: pieces begin at multiples of BN, which divides
    PAGE, so that a block lies in one page."""
    LOG2E: tl.constexpr = 1.4426950408889634
    items = tl.load(count_ptr)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    m = tl.arange(0, BM)
    for work in range(tl.program_id(0), items * kv_heads, tl.num_programs(0)):
        # Heads of one item stand next to each other, so that neighbours read neighbouring memory.
        item = item_ptr + (work // kv_heads) * 8
        head = work % kv_heads
        table_row = tl.load(item)
        row_begin = tl.load(item + 1)
        rows = tl.load(item + 2)
        kv_begin = tl.load(item + 3)
        kv_end = tl.load(item + 4)
        part_base = tl.load(item + 5)
        row = row_begin + m // (W * G)
        token = row * W + (m // G) % W
        q_head = head * G + m % G
        live = m < rows * W * G
        q = tl.load(
            q_ptr + (token[:, None].to(tl.int64) * q_heads + q_head[:, None]) * D + d[None, :],
            mask=live[:, None] & (d < D)[None, :],
            other=0.0,
        )
        # Exclusive end of what each query token may see: its own position is the last.
        limit = tl.load(seq_ptr + row, mask=live, other=0) - W + (m // G) % W + 1
        if WINDOW:
            first = tl.maximum(limit - window, 0)
            lowest = tl.min(tl.where(live, first, 2147483647), axis=0)
            kv_begin = tl.maximum(kv_begin, (lowest // BN) * BN)
        top = tl.full((BM,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((BM,), dtype=tl.float32)
        acc = tl.zeros((BM, BDV), dtype=tl.float32)
        table = table_ptr + table_row.to(tl.int64) * table_stride
        if IN_PAGE:
            # One number a block, loaded a block ahead: the loads of keys and values must not wait for it.
            following = tl.load(table + kv_begin // PAGE).to(tl.int64)
        for start in range(kv_begin, kv_end, BN):
            pos = start + tl.arange(0, BN)
            there = pos < kv_end
            if WINDOW:
                # Behind the window pages may be others' by now, and a weight of zero makes nothing of what is not a number.
                there = there & (pos >= lowest)
            if IN_PAGE:
                one = following
                following = tl.load(table + tl.minimum(start + BN, kv_end - 1) // PAGE).to(tl.int64)
                inner = start % PAGE + tl.arange(0, BN)
                k_at = k_ptr + one * s_page + head * s_head + inner[None, :] * s_pos + d[:, None]
                v_at = v_ptr + one * v_page + head * v_head + inner[:, None] * v_pos + dv[None, :]
            else:
                page = tl.load(table + pos // PAGE, mask=there, other=0).to(tl.int64)
                k_at = k_ptr + page[None, :] * s_page + head * s_head + (pos % PAGE)[None, :] * s_pos + d[:, None]
                v_at = v_ptr + page[:, None] * v_page + head * v_head + (pos % PAGE)[:, None] * v_pos + dv[None, :]
            k = tl.load(k_at, mask=there[None, :] & (d < D)[:, None], other=0.0)
            v = tl.load(v_at, mask=there[:, None] & (dv < DV)[None, :], other=0.0)
            s = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
            if SOFTCAP:
                s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)
            s = s * LOG2E
            seen = there[None, :] & (pos[None, :] < limit[:, None])
            if WINDOW:
                seen = seen & (pos[None, :] >= first[:, None])
            s = tl.where(seen, s, -float("inf"))
            new_top = tl.maximum(top, tl.max(s, axis=1))
            # A row that has seen nothing yet keeps its maximum at -inf; subtracting 0 instead keeps NaN out.
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            p = tl.exp2(s - base[:, None])
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(p, axis=1)
            acc = acc * fade[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision="ieee")
            top = new_top
        single = tl.load(parts_ptr + row, mask=live, other=0) == 1
        if SINKS:
            sink = tl.load(sink_ptr + q_head, mask=live, other=0.0) * LOG2E
            whole_top = tl.maximum(top, sink)
            fade = tl.exp2(top - whole_top)
            final = acc * (fade / (total * fade + tl.exp2(sink - whole_top)))[:, None]
        else:
            final = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        o_row = token.to(tl.int64) * q_heads + q_head
        tl.store(
            out_ptr + o_row[:, None] * DV + dv[None, :],
            final.to(out_ptr.dtype.element_ty),
            mask=(live & single)[:, None] & (dv < DV)[None, :],
        )
        split = live & (single == 0)
        part = (part_base + token - row_begin * W).to(tl.int64) * q_heads + q_head
        tl.store(acc_ptr + part[:, None] * DV + dv[None, :], acc, mask=split[:, None] & (dv < DV)[None, :])
        tl.store(ml_ptr + part * 2, top, mask=split)
        tl.store(ml_ptr + part * 2 + 1, total, mask=split)


@triton.jit
def merge_parts(
    acc_ptr, ml_ptr, parts_ptr, part_table_ptr, out_ptr, sink_ptr, q_heads, table_stride,
    W: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a (query token, head): combines the parts of a row that has several."""
    LOG2E: tl.constexpr = 1.4426950408889634
    token, head = tl.program_id(0), tl.program_id(1)
    row = token // W
    parts = tl.load(parts_ptr + row)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if parts > 1:
        dv = tl.arange(0, BDV)
        top = tl.full((), -float("inf"), dtype=tl.float32)
        total = tl.full((), 0.0, dtype=tl.float32)
        acc = tl.zeros((BDV,), dtype=tl.float32)
        for first in range(0, parts, BP):
            p = first + tl.arange(0, BP)
            there = p < parts
            at = tl.load(part_table_ptr + row * table_stride + p, mask=there, other=0) + token % W
            at = at.to(tl.int64) * q_heads + head
            m = tl.load(ml_ptr + at * 2, mask=there, other=-float("inf"))
            length = tl.load(ml_ptr + at * 2 + 1, mask=there, other=0.0)
            a = tl.load(acc_ptr + at[:, None] * DV + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0)
            new_top = tl.maximum(top, tl.max(m, axis=0))
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            weight = tl.exp2(m - base)
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(length * weight, axis=0)
            acc = acc * fade + tl.sum(a * weight[:, None], axis=0)
            top = new_top
        if SINKS:
            sink = tl.load(sink_ptr + head) * LOG2E
            whole_top = tl.maximum(top, sink)
            fade = tl.exp2(top - whole_top)
            final = acc * (fade / (total * fade + tl.exp2(sink - whole_top)))
        else:
            final = acc / tl.where(total == 0.0, 1.0, total)
        out = (token.to(tl.int64) * q_heads + head) * DV + dv
        tl.store(out_ptr + out, final.to(out_ptr.dtype.element_ty), mask=dv < DV)

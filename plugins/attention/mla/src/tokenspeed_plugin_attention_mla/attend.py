"""Attention of absorbed queries over paged latents: each tile of latents is fetched once, and serves as keys and as values.

A query tile is BM of the ``tokens * heads`` absorbed queries of one row, which all read the same latents: the query tokens of a row are folded into its heads.
An item is ``(row, first query, kv_begin, kv_end, part, 0, 0, 0)`` int32: a query tile and the stretch of latents to read for it. Where a stretch is
all that its row has, ``part`` is -1 and the result is final; else the unnormalised sum, the running maximum and the sum of weights (base 2) are kept in fp32
under that number, and ``merge_parts`` combines them. Splitting KV follows Flash-Decoding (Dao et al., 2023); absorption is of DeepSeek-V2 (2024).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["ITEM_FIELDS", "attend_items", "merge_parts"]

ITEM_FIELDS = 8


@triton.jit(do_not_specialize_on_alignment=["table_ptr", "seq_ptr", "start_ptr", "item_ptr", "range_ptr"])
def attend_items(
    q_ptr, c_ptr, table_ptr, seq_ptr, start_ptr, item_ptr, range_ptr, out_ptr, acc_ptr, ml_ptr,
    heads, part_stride, table_stride, s_page, scale, out_scale,
    BLOCKS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STEP: tl.constexpr, SWAP: tl.constexpr, IN_PAGE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Program ``BLOCKS * g + b`` works through the items of range ``g``, each for the query tile ``b`` behind the item's own first query: the programs that
    share a range fetch the same latents at the same time, from L2 but for the first.

    ``scale`` is in base 2 and holds the latents' scale; ``out_scale`` is the latents' scale. SWAP computes transposed products, latents times queries: the
    matrix units of sm_90 take their 64 rows from the latents, where a tile of 16 queries would leave three quarters of them idle. IN_PAGE: stretches begin at
    multiples of BN, which divides PAGE, so that a tile lies in one page. Products are of type COMPUTE.
    """
    dim: tl.constexpr = RANK + ROPE
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    d = tl.arange(0, RANK)
    e = tl.arange(0, ROPE)
    n = tl.arange(0, BN)
    last = tl.load(range_ptr + group + 1)
    for index in range(tl.load(range_ptr + group), last):
        item = item_ptr + index * 8
        row = tl.load(item)
        m = tl.load(item + 1) + block * BM + tl.arange(0, BM)
        part = tl.load(item + 4)
        first = tl.load(start_ptr + row)
        width = tl.load(start_ptr + row + 1) - first
        first -= tl.load(start_ptr)  # of the step's rows these may be the last
        length = tl.load(seq_ptr + row)
        kv_begin = tl.load(item + 2)
        # The device's length counts: the plan's is an upper bound.
        kv_end = tl.minimum(tl.load(item + 3), length)
        live = m < width * heads
        query = first.to(tl.int64) * heads + m
        # Exclusive end of what each query may see: its own position is the last.
        limit = length - width + m // heads + 1
        at = q_ptr + query[:, None] * dim
        qc = tl.load(at + d[None, :], mask=live[:, None], other=0.0).to(COMPUTE)
        qr = tl.load(at + RANK + e[None, :], mask=live[:, None], other=0.0).to(COMPUTE)
        top = tl.full((BM,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((BM,), dtype=tl.float32)
        if SWAP:
            acc = tl.zeros((RANK, BM), dtype=tl.float32)
        else:
            acc = tl.zeros((BM, RANK), dtype=tl.float32)
        table = table_ptr + row.to(tl.int64) * table_stride
        if IN_PAGE:
            # One number a tile, loaded a tile ahead: the loads of latents must not wait for it.
            following = tl.load(table + kv_begin // PAGE, mask=kv_begin < kv_end, other=0).to(tl.int64)
        for begin in range(kv_begin, kv_end, BN):
            pos = begin + n
            there = pos < kv_end
            if IN_PAGE:
                token = c_ptr + following * s_page + (begin % PAGE) * STEP + n * STEP
                following = tl.load(table + tl.minimum(begin + BN, kv_end - 1) // PAGE).to(tl.int64)
            else:
                page = tl.load(table + pos // PAGE, mask=there, other=0).to(tl.int64)
                token = c_ptr + page * s_page + (pos % PAGE) * STEP
            c = tl.load(token[:, None] + d[None, :], mask=there[:, None], other=0.0).to(COMPUTE)
            r = tl.load(token[:, None] + RANK + e[None, :], mask=there[:, None], other=0.0).to(COMPUTE)
            if SWAP:
                s = tl.dot(c, tl.trans(qc), input_precision="ieee")
                s = tl.dot(r, tl.trans(qr), s, input_precision="ieee") * scale
                s = tl.where(there[:, None] & (pos[:, None] < limit[None, :]), s, -float("inf"))
                new_top = tl.maximum(top, tl.max(s, axis=0))
                # Queries that have seen nothing yet keep their maximum at -inf; subtracting 0 instead keeps NaN out.
                base = tl.where(new_top == -float("inf"), 0.0, new_top)
                p = tl.exp2(s - base[None, :])
                fade = tl.exp2(top - base)
                total = total * fade + tl.sum(p, axis=0)
                acc = tl.dot(tl.trans(c), p.to(COMPUTE), acc * fade[None, :], input_precision="ieee")
            else:
                s = tl.dot(qc, tl.trans(c), input_precision="ieee")
                s = tl.dot(qr, tl.trans(r), s, input_precision="ieee") * scale
                s = tl.where(there[None, :] & (pos[None, :] < limit[:, None]), s, -float("inf"))
                new_top = tl.maximum(top, tl.max(s, axis=1))
                base = tl.where(new_top == -float("inf"), 0.0, new_top)
                p = tl.exp2(s - base[:, None])
                fade = tl.exp2(top - base)
                total = total * fade + tl.sum(p, axis=1)
                acc = tl.dot(p.to(COMPUTE), c, acc * fade[:, None], input_precision="ieee")
            top = new_top
        if SWAP:
            acc = tl.trans(acc)
        if part < 0:
            share = out_scale / tl.where(total == 0.0, 1.0, total)
            tl.store(
                out_ptr + query[:, None] * RANK + d[None, :],
                (acc * share[:, None]).to(out_ptr.dtype.element_ty),
                mask=live[:, None],
            )
        else:
            entry = part.to(tl.int64) * part_stride + m
            tl.store(acc_ptr + entry[:, None] * RANK + d[None, :], acc, mask=live[:, None])
            tl.store(ml_ptr + entry * 2, top, mask=live)
            tl.store(ml_ptr + entry * 2 + 1, total, mask=live)


@triton.jit
def merge_parts(
    acc_ptr, ml_ptr, part_ptr, out_ptr, out_scale,
    QUERIES: tl.constexpr, RANK: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (query, row): combines the parts ``part_ptr[row]`` to ``part_ptr[row + 1]`` of a row that has several; QUERIES is the rows' ``width * heads``."""
    query, row = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(part_ptr + row), tl.load(part_ptr + row + 1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if last > first:
        d = tl.arange(0, RANK)
        top = tl.full((), -float("inf"), dtype=tl.float32)
        total = tl.full((), 0.0, dtype=tl.float32)
        acc = tl.zeros((RANK,), dtype=tl.float32)
        for begin in range(first, last, BP):
            part = begin + tl.arange(0, BP)
            there = part < last
            entry = part.to(tl.int64) * QUERIES + query
            m = tl.load(ml_ptr + entry * 2, mask=there, other=-float("inf"))
            weight = tl.load(ml_ptr + entry * 2 + 1, mask=there, other=0.0)
            a = tl.load(acc_ptr + entry[:, None] * RANK + d[None, :], mask=there[:, None], other=0.0)
            new_top = tl.maximum(top, tl.max(m, axis=0))
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            factor = tl.exp2(m - base)
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(weight * factor, axis=0)
            acc = acc * fade + tl.sum(a * factor[:, None], axis=0)
            top = new_top
        share = out_scale / tl.where(total == 0.0, 1.0, total)
        out = (row.to(tl.int64) * QUERIES + query) * RANK + d
        tl.store(out_ptr + out, (acc * share).to(out_ptr.dtype.element_ty))

"""Hopper, few queries (16 or 32 a tile): transposed products, so that the matrix units take their 64 rows from the latents and no query is padding.

One warp copies tiles of 64 latents into two places of shared memory, each with its barriers ("full", "free"); four warps compute
scores^T = latents * queries^T and values^T += latents^T * weights^T from there. What a program works through is the same as in ``attend``: ranges of items.
Warp specialisation and the copies by the tensor memory unit follow what FlashAttention-3 (Shah et al., 2024) does.
"""

# ruff: noqa: RUF059, SIM113 - what partitions share is handed over in tuples, unpacked whole; Gluon has no enumerate
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["attend_narrow"]

# Names that changed between Triton 3.6 and 3.9.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.constexpr_function
def _products(queries):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, queries, 16])


@gluon.jit
def _feed(descs, tables, bufs, bars, QUERIES: gl.constexpr, STAGES: gl.constexpr):
    q_desc, qe_desc, c_desc, r_desc = descs
    table_ptr, seq_ptr, start_ptr, item_ptr, range_ptr, heads, table_stride, page_size, blocks = tables
    q_l, q_r, q_e, k_l, k_r, k_e, p_buf = bufs
    q_full, q_free, full, free = bars
    group = gl.program_id(0) // blocks
    block = gl.program_id(0) % blocks
    turn = 0
    done = 0
    for index in range(gl.load(range_ptr + group), gl.load(range_ptr + group + 1)):
        item = item_ptr + index * 8
        row = gl.load(item)
        begin = gl.load(item + 2)
        end = gl.minimum(gl.load(item + 3), gl.load(seq_ptr + row))
        first = gl.load(start_ptr + row) - gl.load(start_ptr)
        at = first * heads + gl.load(item + 1) + block * QUERIES
        table = table_ptr + row.to(gl.int64) * table_stride
        last = gl.maximum(end - 1, begin)
        ahead = gl.load(table + begin // page_size)
        mbarrier.wait(q_free, (done & 1) ^ 1)
        mbarrier.expect(q_full, QUERIES * 1152)
        _copy(q_desc, [at, 0], q_full, q_l)
        _copy(q_desc, [at, 256], q_full, q_r)
        _copy(qe_desc, [at, 512], q_full, q_e)
        done += 1
        for at0 in range(begin, end, 64):
            stage = turn % STAGES
            at_row = ahead * page_size + at0 % page_size
            ahead = gl.load(table + gl.minimum(at0 + 64, last) // page_size)
            mbarrier.wait(free.index(stage), (turn // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), 73728)
            _copy(c_desc, [at_row, 0], full.index(stage), k_l.index(stage))
            _copy(c_desc, [at_row, 256], full.index(stage), k_r.index(stage))
            _copy(r_desc, [at_row, 512], full.index(stage), k_e.index(stage))
            turn += 1


@gluon.jit
def _clear_tail(buf, keep):
    """Latents from ``keep`` on become zero: what lies there may be NaN, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    for i in gl.static_range(4):
        piece = buf.slice(64 * i, 64, dim=1)
        x = piece.load(layout)
        piece.store(gl.where((n < keep)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def _attend(params, outs, tables, bufs, bars, QUERIES: gl.constexpr, STAGES: gl.constexpr):
    L: gl.constexpr = _products(QUERIES)
    ROW: gl.constexpr = gl.SliceLayout(0, L)
    COL: gl.constexpr = gl.SliceLayout(1, L)
    scale, out_scale = params
    out_ptr, acc_ptr, ml_ptr, part_stride = outs
    table_ptr, seq_ptr, start_ptr, item_ptr, range_ptr, heads, table_stride, page_size, blocks = tables
    q_l, q_r, q_e, k_l, k_r, k_e, p_buf = bufs
    q_full, q_free, full, free = bars
    group = gl.program_id(0) // blocks
    block = gl.program_id(0) % blocks
    turn = 0
    done = 0
    for index in range(gl.load(range_ptr + group), gl.load(range_ptr + group + 1)):
        item = item_ptr + index * 8
        row = gl.load(item)
        m0 = gl.load(item + 1) + block * QUERIES
        begin = gl.load(item + 2)
        part = gl.load(item + 4)
        length = gl.load(seq_ptr + row)
        end = gl.minimum(gl.load(item + 3), length)
        first = gl.load(start_ptr + row)
        width = gl.load(start_ptr + row + 1) - first
        first -= gl.load(start_ptr)
        live = width * heads
        m = m0 + gl.arange(0, QUERIES, layout=ROW)
        n = gl.arange(0, 64, layout=COL)
        limit = length - width + m // heads + 1
        free_to = gl.minimum(end, length - width + m0 // heads + 1)
        top = gl.full([QUERIES], -float("inf"), gl.float32, ROW)
        total = gl.zeros([QUERIES], gl.float32, ROW)
        acc_l = gl.zeros([256, QUERIES], gl.float32, L)
        acc_r = gl.zeros([256, QUERIES], gl.float32, L)
        mbarrier.wait(q_full, done & 1)
        done += 1
        for at in range(begin, end, 64):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), turn // STAGES & 1)
            s = gl.zeros([64, QUERIES], gl.float32, L)
            s = warpgroup_mma(k_l.index(stage), q_l.permute((1, 0)), s, use_acc=False, is_async=True)
            s = warpgroup_mma(k_r.index(stage), q_r.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(k_e.index(stage), q_e.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, [s]) * scale
            if at + 64 > free_to:
                pos = at + n
                s = gl.where((pos < end)[:, None] & (pos[:, None] < limit[None, :]), s, -float("inf"))
            new_top = gl.maximum(top, gl.max(s, axis=0))
            base = gl.where(new_top == -float("inf"), 0.0, new_top)
            p = gl.exp2(s - base[None, :])
            fade = gl.exp2(top - base)
            top = new_top
            p_buf.store(p.to(gl.bfloat16))
            if at + 64 > end:
                _clear_tail(k_l.index(stage), end - at)
                _clear_tail(k_r.index(stage), end - at)
            fence_async_shared()
            _barrier()
            acc_l = acc_l * fade[None, :]
            acc_r = acc_r * fade[None, :]
            acc_l = warpgroup_mma(k_l.index(stage).permute((1, 0)), p_buf, acc_l, is_async=True)
            acc_r = warpgroup_mma(k_r.index(stage).permute((1, 0)), p_buf, acc_r, is_async=True)
            total = total * fade + gl.sum(p, axis=0)
            acc_l, acc_r = warpgroup_mma_wait(0, [acc_l, acc_r])
            mbarrier.arrive(free.index(stage), count=1)
            turn += 1
        mbarrier.arrive(q_free, count=1)
        d = gl.arange(0, 256, layout=COL)
        there = m < live
        if part < 0:
            share = out_scale / gl.where(total == 0.0, 1.0, total)
            out = out_ptr + (first.to(gl.int64) * heads + m)[None, :] * 512 + d[:, None]
            gl.store(out, (acc_l * share[None, :]).to(out_ptr.dtype.element_ty), mask=there[None, :])
            gl.store(out + 256, (acc_r * share[None, :]).to(out_ptr.dtype.element_ty), mask=there[None, :])
        else:
            entry = part.to(gl.int64) * part_stride + m
            at_acc = acc_ptr + entry[None, :] * 512 + d[:, None]
            gl.store(at_acc, acc_l, mask=there[None, :])
            gl.store(at_acc + 256, acc_r, mask=there[None, :])
            gl.store(ml_ptr + entry * 2, top, mask=there)
            gl.store(ml_ptr + entry * 2 + 1, total, mask=there)


@gluon.jit
def attend_narrow(
    q_desc, qe_desc, c_desc, r_desc, table_ptr, seq_ptr, start_ptr, item_ptr, range_ptr, out_ptr, acc_ptr, ml_ptr,
    heads, part_stride, table_stride, page_size, blocks, scale, out_scale, QUERIES: gl.constexpr, STAGES: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Program ``blocks * g + b`` works through the items of range ``g``, each for the query tile ``b`` behind the item's own first query.

    Descriptors, all bf16: the queries (tokens * heads, 576) in boxes of QUERIES x 256 and QUERIES x 64, the latents (pages * page_size, 576) in boxes of
    64 x 256 and 64 x 64. ``page_size`` is a multiple of 64, stretches begin at multiples of it. The rest is as in ``attend.attend_items``.
    """
    bf16: gl.constexpr = gl.bfloat16
    wide: gl.constexpr = c_desc.layout
    q_l = gl.allocate_shared_memory(bf16, [QUERIES, 256], wide)
    q_r = gl.allocate_shared_memory(bf16, [QUERIES, 256], wide)
    q_e = gl.allocate_shared_memory(bf16, [QUERIES, 64], wide)
    k_l = gl.allocate_shared_memory(bf16, [STAGES, 64, 256], wide)
    k_r = gl.allocate_shared_memory(bf16, [STAGES, 64, 256], wide)
    k_e = gl.allocate_shared_memory(bf16, [STAGES, 64, 64], wide)
    p_buf = gl.allocate_shared_memory(bf16, [64, QUERIES], P_LAYOUT)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], one)
    q_free = gl.allocate_shared_memory(gl.int64, [1], one)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=1)
    for b in gl.static_range(STAGES):
        mbarrier.init(full.index(b), count=1)
        mbarrier.init(free.index(b), count=1)
    fence_async_shared()
    tables = (table_ptr, seq_ptr, start_ptr, item_ptr, range_ptr, heads, table_stride, page_size, blocks)
    bufs = (q_l, q_r, q_e, k_l, k_r, k_e, p_buf)
    bars = (q_full, q_free, full, free)
    gl.warp_specialize(
        [
            (
                _attend,
                ((scale, out_scale), (out_ptr, acc_ptr, ml_ptr, part_stride), tables, bufs, bars, QUERIES, STAGES),
            ),
            (_feed, ((q_desc, qe_desc, c_desc, r_desc), tables, bufs, bars, QUERIES, STAGES)),
        ],
        [1],
        [40],
    )

"""Hopper, many queries (64 a tile): two warpgroups share the work on each pair of tiles of 64 latents, a third warp copies.

Warpgroup w computes the scores of tile w of the pair and sums, over both tiles, the columns ``256 w`` to ``256 w + 255`` of the values: what one warpgroup
holds in registers is then 64 x 256 sums. The weights of a tile reach the other warpgroup through shared memory, and with them the running maximum, which
goes from tile to tile in order. The halves of a tile are set free, and copied anew, as soon as the warpgroup that sums their columns has read them. The
rotated elements of the queries stay in registers: shared memory has no room for them.

A tile comes in nine pieces of 64 columns, each with a barrier of its own, in the order in which their places become free: the rotated elements, then the half
that its own warpgroup sums, then the other. Scores begin with the first piece, so that the products of a tile run while the rest of it is copied.

Tiles and pieces are numbered by ``turn >> 30``, which is always 0 but not for the compiler: with constant numbers it computes the descriptors of all
operands before the loop, spills them, and loads each from local memory just before its product, which cost a quarter of the kernel's time.

The division of the sums over two warpgroups, with scores computed once, is that of FlashMLA (DeepSeek, 2025).
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

__all__ = ["attend_wide"]

# Names that changed between Triton 3.6 and 3.9.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.constexpr_function
def _scores():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])


@gluon.constexpr_function
def _sums():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])


@gluon.jit
def _copy_half(c_desc, at_row, column, buf, full, free, tile: gl.constexpr, phase):
    """Four pieces from ``column`` on, into ``tile``'s half ``buf`` once that is free."""
    pieces = _view(buf, gl.bfloat16, [8, 64, 64], c_desc.layout)
    mbarrier.wait(free.index(tile), phase)
    for i in gl.static_range(4):
        mbarrier.expect(full.index(4 * tile + i), 8192)
        _copy(c_desc, [at_row, column + 64 * i], full.index(4 * tile + i), pieces.index(4 * tile + i))


@gluon.jit
def _feed(descs, tables, bufs, bars):
    q_desc, c_desc = descs
    table_ptr, seq_ptr, start_ptr, item_ptr, range_ptr, heads, table_stride, page_size, blocks = tables
    q_l, q_r, k_l, k_r, k_e, p_buf, top_buf, fade_buf, total_buf = bufs
    q_full, q_free, l_full, r_full, e_full, l_free, r_free, e_free, p_full, p_free, t_full = bars
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
        at = first * heads + gl.load(item + 1) + block * 64
        table = table_ptr + row.to(gl.int64) * table_stride
        last = gl.maximum(end - 1, begin)
        ahead0 = gl.load(table + begin // page_size)
        ahead1 = gl.load(table + gl.minimum(begin + 64, last) // page_size)
        mbarrier.wait(q_free, (done & 1) ^ 1)
        mbarrier.expect(q_full, 65536)
        _copy(q_desc, [at, 0], q_full, q_l.index(0))
        _copy(q_desc, [at, 256], q_full, q_r.index(0))
        done += 1
        for pair in range(begin, end, 128):
            phase = (turn & 1) ^ 1
            row0 = ahead0 * page_size + pair % page_size
            row1 = ahead1 * page_size + (pair + 64) % page_size
            ahead0 = gl.load(table + gl.minimum(pair + 128, last) // page_size)
            ahead1 = gl.load(table + gl.minimum(pair + 192, last) // page_size)
            for tile in gl.static_range(2):
                at_row = row0 if tile == 0 else row1
                mbarrier.wait(e_free.index(tile), phase)
                mbarrier.expect(e_full.index(tile), 8192)
                _copy(c_desc, [at_row, 512], e_full.index(tile), k_e.index(tile))
                if tile == 0:
                    _copy_half(c_desc, at_row, 0, k_l, l_full, l_free, tile, phase)
                    _copy_half(c_desc, at_row, 256, k_r, r_full, r_free, tile, phase)
                else:
                    _copy_half(c_desc, at_row, 256, k_r, r_full, r_free, tile, phase)
                    _copy_half(c_desc, at_row, 0, k_l, l_full, l_free, tile, phase)
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
    fence_async_shared()


@gluon.jit
def _add_half(s, q, k, full, tile: gl.constexpr, zero, phase):
    """The products of four pieces of the queries and of the latents of ``tile``, each issued once its piece is there."""
    NARROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    of_q = _view(q, gl.bfloat16, [4, 64, 64], NARROW)
    of_k = _view(k, gl.bfloat16, [8, 64, 64], NARROW)
    for i in gl.static_range(4):
        mbarrier.wait(full.index(4 * tile + i), phase)
        s = warpgroup_mma(of_q.index(zero + i), of_k.index(4 * (tile + zero) + i).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _attend(params, outs, tables, bufs, bars, WG: gl.constexpr):
    S_L: gl.constexpr = _scores()
    O_L: gl.constexpr = _sums()
    QE_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_L)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_L)
    scale, out_scale = params
    q_ptr, out_ptr, acc_ptr, ml_ptr, part_stride = outs
    table_ptr, seq_ptr, start_ptr, item_ptr, range_ptr, heads, table_stride, page_size, blocks = tables
    q_l, q_r, k_l, k_r, k_e, p_buf, top_buf, fade_buf, total_buf = bufs
    q_full, q_free, l_full, r_full, e_full, l_free, r_free, e_free, p_full, p_free, t_full = bars
    if WG == 0:
        values, values_free = k_l, l_free
    else:
        values, values_free = k_r, r_free
    group = gl.program_id(0) // blocks
    block = gl.program_id(0) % blocks
    turn = 0
    done = 0
    m_s = gl.arange(0, 64, layout=ROW_S)
    n_s = gl.arange(0, 64, layout=gl.SliceLayout(0, S_L))
    for index in range(gl.load(range_ptr + group), gl.load(range_ptr + group + 1)):
        item = item_ptr + index * 8
        row = gl.load(item)
        m0 = gl.load(item + 1) + block * 64
        begin = gl.load(item + 2)
        part = gl.load(item + 4)
        length = gl.load(seq_ptr + row)
        end = gl.minimum(gl.load(item + 3), length)  # the device's length counts: the plan's is an upper bound
        first = gl.load(start_ptr + row)
        width = gl.load(start_ptr + row + 1) - first
        first -= gl.load(start_ptr)
        live = width * heads
        query0 = first.to(gl.int64) * heads + m0
        m_q = gl.arange(0, 64, layout=gl.SliceLayout(1, QE_L))
        e_q = gl.arange(0, 64, layout=gl.SliceLayout(0, QE_L))
        q_e = gl.load(
            q_ptr + (query0 + m_q)[:, None] * 576 + 512 + e_q[None, :], mask=(m0 + m_q < live)[:, None], other=0.0
        )
        limit = length - width + (m0 + m_s) // heads + 1
        open_to = gl.minimum(end, length - width + m0 // heads + 1)  # before it nothing is masked
        top = gl.full([64], -float("inf"), gl.float32, ROW_S)
        total = gl.zeros([64], gl.float32, ROW_S)
        acc = gl.zeros([64, 256], gl.float32, O_L)
        mbarrier.wait(q_full, done & 1)
        # Two places take turns: the other warpgroup may still read the sums of the item before.
        place = (done & 1) * 2
        done += 1
        if begin >= end:
            mbarrier.arrive(q_free, count=1)
        for pair in range(begin, end, 128):
            phase = turn & 1
            zero = turn >> 30  # see above
            at = pair + WG * 64
            s = gl.zeros([64, 64], gl.float32, S_L)
            mbarrier.wait(e_full.index(WG), phase)
            s = warpgroup_mma(q_e, k_e.index(WG + zero).permute((1, 0)), s, use_acc=False, is_async=True)
            if WG == 0:
                s = _add_half(s, q_l, k_l, l_full, WG, zero, phase)
                s = _add_half(s, q_r, k_r, r_full, WG, zero, phase)
            else:
                s = _add_half(s, q_r, k_r, r_full, WG, zero, phase)
                s = _add_half(s, q_l, k_l, l_full, WG, zero, phase)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(e_free.index(WG), count=1)
            if pair + 128 >= end:
                mbarrier.arrive(q_free, count=1)
            s = s * scale
            if at + 64 > open_to:
                pos = at + n_s
                s = gl.where((pos < end)[None, :] & (pos[None, :] < limit[:, None]), s, -float("inf"))
            peak = gl.max(s, axis=1)
            if WG == 1:  # the first tile's weights, while its own are computed
                mbarrier.wait(p_full.index(0), phase)
                top = top_buf.index(0).load(ROW_S)
                total = total * fade_buf.index(0).load(ROW_S)
                acc = acc * fade_buf.index(0).load(ROW_O)[:, None]
                if pair + 64 > end:
                    _clear_tail(values.index(0), end - pair)
                acc = warpgroup_mma(p_buf.index(zero), values.index(zero), acc, is_async=True)
            new_top = gl.maximum(top, peak)
            # Queries that have seen nothing yet keep their maximum at -inf; subtracting 0 instead keeps NaN out.
            base = gl.where(new_top == -float("inf"), 0.0, new_top)
            p = gl.exp2(s - base[:, None])
            fade = gl.exp2(top - base)
            top = new_top
            total = total * fade + gl.sum(p, axis=1)
            p16 = p.to(gl.bfloat16)
            mbarrier.wait(p_free.index(WG), phase ^ 1)
            p_buf.index(WG).store(p16)
            top_buf.index(WG).store(top)
            fade_buf.index(WG).store(fade)
            fence_async_shared()
            mbarrier.arrive(p_full.index(WG), count=1)
            p_own = gl.convert_layout(p16, P_L)
            fade_own = gl.convert_layout(fade, ROW_O)
            if WG == 1:
                acc = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(p_free.index(0), count=1)
                mbarrier.arrive(values_free.index(0), count=1)
            acc = acc * fade_own[:, None]
            if at + 64 > end:
                _clear_tail(values.index(WG), end - at)
            acc = warpgroup_mma(p_own, values.index(WG + zero), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(values_free.index(WG), count=1)
            if WG == 0:
                mbarrier.wait(p_full.index(1), phase)
                top = top_buf.index(1).load(ROW_S)
                total = total * fade_buf.index(1).load(ROW_S)
                acc = acc * fade_buf.index(1).load(ROW_O)[:, None]
                if pair + 128 > end:
                    _clear_tail(values.index(1), end - pair - 64)
                acc = warpgroup_mma(p_buf.index(1 + zero), values.index(1 + zero), acc, is_async=True)
                acc = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(p_free.index(1), count=1)
                mbarrier.arrive(values_free.index(1), count=1)
            turn += 1
        # Each has summed the weights of its own tiles.
        total_buf.index(place + WG).store(total)
        mbarrier.arrive(t_full, count=1)
        mbarrier.wait(t_full, (done & 1) ^ 1)
        both = total_buf.index(place).load(ROW_O) + total_buf.index(place + 1).load(ROW_O)
        m_o = gl.arange(0, 64, layout=ROW_O)
        d_o = WG * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, O_L))
        there = m0 + m_o < live
        if part < 0:
            share = out_scale / gl.where(both == 0.0, 1.0, both)
            gl.store(
                out_ptr + (query0 + m_o)[:, None] * 512 + d_o[None, :],
                (acc * share[:, None]).to(out_ptr.dtype.element_ty),
                mask=there[:, None],
            )
        else:
            entry = part.to(gl.int64) * part_stride + m0 + m_o
            gl.store(acc_ptr + entry[:, None] * 512 + d_o[None, :], acc, mask=there[:, None])
            if WG == 0:
                gl.store(ml_ptr + entry * 2, gl.convert_layout(top, ROW_O), mask=there)
                gl.store(ml_ptr + entry * 2 + 1, both, mask=there)


@gluon.jit
def _first(params, outs, tables, bufs, bars):
    _attend(params, outs, tables, bufs, bars, 0)


@gluon.jit
def _second(params, outs, tables, bufs, bars):
    _attend(params, outs, tables, bufs, bars, 1)


@gluon.jit
def attend_wide(
    q_desc, c_desc, q_ptr, table_ptr, seq_ptr, start_ptr, item_ptr, range_ptr, out_ptr, acc_ptr, ml_ptr,
    heads, part_stride, table_stride, page_size, blocks, scale, out_scale,
):  # fmt: skip
    """Program ``blocks * g + b`` works through the items of range ``g``, each for the query tile ``b`` behind the item's own first query.

    Descriptors, all bf16: the queries (tokens * heads, 576) in boxes of 64 x 256, the latents (pages * page_size, 576) in boxes of 64 x 64.
    ``page_size`` is a multiple of 64, stretches begin at multiples of it. The rest is as in ``attend.attend_items``.
    """
    bf16: gl.constexpr = gl.bfloat16
    wide: gl.constexpr = q_desc.layout
    narrow: gl.constexpr = c_desc.layout
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    one: gl.constexpr = mbarrier.MBarrierLayout()
    q_l = gl.allocate_shared_memory(bf16, [1, 64, 256], wide)
    q_r = gl.allocate_shared_memory(bf16, [1, 64, 256], wide)
    k_l = gl.allocate_shared_memory(bf16, [2, 64, 256], wide)
    k_r = gl.allocate_shared_memory(bf16, [2, 64, 256], wide)
    k_e = gl.allocate_shared_memory(bf16, [2, 64, 64], narrow)
    p_buf = gl.allocate_shared_memory(bf16, [2, 64, 64], narrow)
    top_buf = gl.allocate_shared_memory(gl.float32, [2, 64], vector)
    fade_buf = gl.allocate_shared_memory(gl.float32, [2, 64], vector)
    total_buf = gl.allocate_shared_memory(gl.float32, [4, 64], vector)
    q_full = gl.allocate_shared_memory(gl.int64, [1], one)
    q_free = gl.allocate_shared_memory(gl.int64, [1], one)
    t_full = gl.allocate_shared_memory(gl.int64, [1], one)
    l_full = gl.allocate_shared_memory(gl.int64, [8, 1], one)  # four pieces a tile
    r_full = gl.allocate_shared_memory(gl.int64, [8, 1], one)
    e_full = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    l_free = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    r_free = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    e_free = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    p_free = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    mbarrier.init(t_full, count=2)
    for tile in gl.static_range(2):
        for i in gl.static_range(4):
            mbarrier.init(l_full.index(4 * tile + i), count=1)
            mbarrier.init(r_full.index(4 * tile + i), count=1)
        mbarrier.init(e_full.index(tile), count=1)
        mbarrier.init(l_free.index(tile), count=1)
        mbarrier.init(r_free.index(tile), count=1)
        mbarrier.init(e_free.index(tile), count=1)
        mbarrier.init(p_full.index(tile), count=1)
        mbarrier.init(p_free.index(tile), count=1)
    fence_async_shared()
    params = (scale, out_scale)
    outs = (q_ptr, out_ptr, acc_ptr, ml_ptr, part_stride)
    tables = (table_ptr, seq_ptr, start_ptr, item_ptr, range_ptr, heads, table_stride, page_size, blocks)
    bufs = (q_l, q_r, k_l, k_r, k_e, p_buf, top_buf, fade_buf, total_buf)
    bars = (q_full, q_free, l_full, r_full, e_full, l_free, r_free, e_free, p_full, p_free, t_full)
    gl.warp_specialize(
        [
            (_first, (params, outs, tables, bufs, bars)),
            (_second, (params, outs, tables, bufs, bars)),
            (_feed, ((q_desc, c_desc), tables, bufs, bars)),
        ],
        [4, 1],
        [240, 24],
    )

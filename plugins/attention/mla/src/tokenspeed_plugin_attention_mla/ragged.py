"""Prompts over expanded latents: rows of any length one after another, without padding, every head with keys and values of its own.

Absorbed queries meet latents of 576 and 512 elements a token and head; the heads' own keys and values have 192 and 128. The blocks are those of
FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend_heads", "gather_latents"]


@triton.jit
def gather_latents(
    c_ptr, table_ptr, kv_start_ptr, out_ptr, table_stride, s_page, page_size, scale,
    DIM: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Program (block of BT tokens, row): the row's latents, multiplied by ``scale``, to rows ``kv_start_ptr[row]`` on of ``out_ptr``."""
    row = tl.program_id(1)
    begin = tl.load(kv_start_ptr + row)
    pos = tl.program_id(0) * BT + tl.arange(0, BT)
    there = pos < tl.load(kv_start_ptr + row + 1) - begin
    d = tl.arange(0, BD)
    page = tl.load(table_ptr + row.to(tl.int64) * table_stride + pos // page_size, mask=there, other=0).to(tl.int64)
    mask = there[:, None] & (d < DIM)[None, :]
    token = page * s_page + pos % page_size * DIM
    x = tl.load(c_ptr + token[:, None] + d[None, :], mask=mask, other=0.0)
    if SCALED:
        x = x.to(tl.float32) * scale
    tl.store(
        out_ptr + (begin + pos).to(tl.int64)[:, None] * DIM + d[None, :], x.to(out_ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def _fold(s, v, top, total, acc):
    """One block of scores (base 2, dropped ones -inf) and values into the running maximum, sum and accumulator."""
    new_top = tl.maximum(top, tl.max(s, axis=1))
    # A query that has seen nothing yet keeps its maximum at -inf; subtracting 0 instead keeps NaN out.
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit(do_not_specialize_on_alignment=["start_ptr", "kv_start_ptr", "item_ptr"])
def attend_heads(
    q_ptr, kn_ptr, kr_ptr, v_ptr, start_ptr, kv_start_ptr, item_ptr, out_ptr,
    s_q, s_kn, s_kr, s_v, s_out, scale,
    NOPE: tl.constexpr, ROPE: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Program (head, item): BM query tokens of a row against all that they may see. ``scale`` is in base 2. The rotated keys ``kr_ptr`` are all heads'."""
    head, item = tl.program_id(0), item_ptr + tl.program_id(1) * 8
    row = tl.load(item)
    first = tl.load(item + 1)
    begin = tl.load(start_ptr + row)
    length = tl.load(start_ptr + row + 1) - begin
    kv = tl.load(kv_start_ptr + row)
    context = tl.load(kv_start_ptr + row + 1) - kv - length
    m = first + tl.arange(0, BM)
    n = tl.arange(0, BN)
    d, e, dv = tl.arange(0, NOPE), tl.arange(0, ROPE), tl.arange(0, DV)
    live = m < length
    q_at = q_ptr + (begin + m).to(tl.int64)[:, None] * s_q + head * (NOPE + ROPE)
    qn = tl.load(q_at + d[None, :], mask=live[:, None], other=0.0)
    qr = tl.load(q_at + NOPE + e[None, :], mask=live[:, None], other=0.0)
    limit = context + m + 1
    end = context + tl.minimum(first + BM, length)
    kn_base = kn_ptr + kv.to(tl.int64) * s_kn + head * NOPE
    kr_base = kr_ptr + kv.to(tl.int64) * s_kr
    v_base = v_ptr + kv.to(tl.int64) * s_v + head * DV
    top = tl.full((BM,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, DV), dtype=tl.float32)
    # Every token of the block sees all of these: no masks.
    plain = (context + first + 1) // BN * BN
    for start in range(0, plain, BN):
        pos = (start + n).to(tl.int64)
        kn = tl.load(kn_base + pos[None, :] * s_kn + d[:, None])
        kr = tl.load(kr_base + pos[None, :] * s_kr + e[:, None])
        s = tl.dot(qn, kn, input_precision="ieee")
        s = tl.dot(qr, kr, s, input_precision="ieee") * scale
        v = tl.load(v_base + pos[:, None] * s_v + dv[None, :])
        top, total, acc = _fold(s, v, top, total, acc)
    for start in range(plain, end, BN):
        pos = (start + n).to(tl.int64)
        there = pos < end
        kn = tl.load(kn_base + pos[None, :] * s_kn + d[:, None], mask=there[None, :], other=0.0)
        kr = tl.load(kr_base + pos[None, :] * s_kr + e[:, None], mask=there[None, :], other=0.0)
        s = tl.dot(qn, kn, input_precision="ieee")
        s = tl.dot(qr, kr, s, input_precision="ieee") * scale
        s = tl.where(pos[None, :] < limit[:, None], s, -float("inf"))
        v = tl.load(v_base + pos[:, None] * s_v + dv[None, :], mask=there[:, None], other=0.0)
        top, total, acc = _fold(s, v, top, total, acc)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out_ptr + (begin + m).to(tl.int64)[:, None] * s_out + head * DV + dv[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None])

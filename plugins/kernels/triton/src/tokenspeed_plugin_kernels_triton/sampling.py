"""Choices over logits on the device, and what may be chosen at all. Greedy takes two passes over the vocabulary, so that one row still uses the whole chip."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["apply_bitmask", "argmax"]


@triton.jit
def _partial(x_ptr, val_ptr, idx_ptr, V, stride, parts, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + offs, mask=offs < V, other=-float("inf")).to(tl.float32)
    bad = tl.max((x != x).to(tl.int32), axis=0)
    best, where = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(val_ptr + row * parts + part, best)
    tl.store(idx_ptr + row * parts + part, tl.where(bad > 0, -1, part * BLOCK + where))


@triton.jit
def _final(val_ptr, idx_ptr, out_ptr, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    val = tl.load(val_ptr + row * parts + offs, mask=offs < parts, other=-float("inf"))
    idx = tl.load(idx_ptr + row * parts + offs, mask=offs < parts, other=2147483647)
    bad = tl.min(idx, axis=0) < 0
    best = tl.max(val, axis=0)
    # Lowest index wins: among parts that hold the maximum take the smallest id.
    first = tl.min(tl.where(val == best, idx, 2147483647), axis=0)
    tl.store(out_ptr + row, tl.where(bad, -1, first).to(tl.int64))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the largest of each row of logits (R, V), row stride allowed; ties take the lowest index; a row with NaN yields -1."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    block = 4096 if rows >= 8 else 1024
    parts = triton.cdiv(vocab, block)
    val = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    idx = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    _partial[(rows, parts)](logits, val, idx, vocab, logits.stride(0), parts, BLOCK=block, num_warps=4)
    _final[(rows,)](val, idx, out, parts, BLOCK=triton.next_power_of_2(parts), num_warps=4)
    return out


@triton.jit
def _mask(x_ptr, bits_ptr, rows_ptr, V, stride, words, BLOCK: tl.constexpr):
    item, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + item)
    offs = part * BLOCK + tl.arange(0, BLOCK)
    inside = offs < V
    word = tl.load(bits_ptr + item * words + offs // 32, mask=inside, other=0)
    denied = ((word >> (offs % 32)) & 1) == 0
    # Nothing is read: only what is not allowed is written.
    tl.store(x_ptr + row * stride + offs, tl.full((BLOCK,), -float("inf"), tl.float32), mask=inside & denied)


def apply_bitmask(logits: torch.Tensor, bits: torch.Tensor, rows: torch.Tensor) -> None:
    """Set logits (R, V), row stride allowed, of ``rows`` (n) int64 to -inf in place where ``bits`` (n, ceil(V / 32)) int32 has a 0."""
    count, vocab = len(rows), logits.shape[1]
    if count == 0:
        return
    block = 4096
    grid = (count, triton.cdiv(vocab, block))
    _mask[grid](logits, bits, rows, vocab, logits.stride(0), bits.shape[1], BLOCK=block, num_warps=4)

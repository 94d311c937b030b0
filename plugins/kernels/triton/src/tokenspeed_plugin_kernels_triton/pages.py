"""Whole pages and states, copied and zeroed: blocks of memory of any element type, moved as words."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["copy", "zero"]


@triton.jit
def _copy(pages_ptr, source_ptr, target_ptr, words, stride, BLOCK: tl.constexpr):
    item = tl.program_id(0)
    source = tl.load(source_ptr + item)
    target = tl.load(target_ptr + item)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # a scalar flag does not broadcast under the interpreter
    mask = (offs < words) & (source + 0 * offs >= 0) & (target + 0 * offs >= 0)
    block = tl.load(pages_ptr + source * stride + offs, mask=mask)
    tl.store(pages_ptr + target * stride + offs, block, mask=mask)


@triton.jit
def _zero(pages_ptr, target_ptr, words, stride, BLOCK: tl.constexpr):
    target = tl.load(target_ptr + tl.program_id(0))
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    nothing = tl.zeros((BLOCK,), dtype=pages_ptr.dtype.element_ty)
    tl.store(pages_ptr + target * stride + offs, nothing, mask=(offs < words) & (target + 0 * offs >= 0))


def _words(pages: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """(pages as words, words of a page, words from a page to the next): words of four bytes where pages are made of such, else single bytes."""
    # a view: a page is one contiguous block; a state may be a single element
    flat = pages.flatten(1) if pages.ndim > 1 else pages.unsqueeze(1)
    if flat.data_ptr() != pages.data_ptr():
        raise ValueError("a page must be one contiguous block of memory")
    size = pages.element_size()
    wide = all(bytes_ % 4 == 0 for bytes_ in (flat.shape[1] * size, flat.stride(0) * size, flat.data_ptr()))
    words = flat.view(torch.int32 if wide else torch.uint8)
    return words, words.shape[1], words.stride(0)


def _grid(count: int, words: int) -> tuple[tuple[int, int], int]:
    block = min(4096, triton.next_power_of_2(words))
    return (count, triton.cdiv(words, block)), block


def copy(pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Page ``target[i]`` (n) int64 becomes page ``source[i]`` of pages (P, ...); -1: nothing happens. Targets are distinct and none is a source."""
    if source.shape[0] and pages.numel():
        words, count, stride = _words(pages)
        grid, block = _grid(source.shape[0], count)
        _copy[grid](words, source, target, count, stride, BLOCK=block, num_warps=4)


def zero(pages: torch.Tensor, target: torch.Tensor) -> None:
    """Pages ``target`` (n) int64 of pages (P, ...) become zeros; -1: none."""
    if target.shape[0] and pages.numel():
        words, count, stride = _words(pages)
        grid, block = _grid(target.shape[0], count)
        _zero[grid](words, target, count, stride, BLOCK=block, num_warps=4)

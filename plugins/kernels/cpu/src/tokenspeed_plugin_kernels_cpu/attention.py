"""Paged attention of decode rows and of chunks (C++: ``attention.cpp``, ``kernels_attention.h``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tokenspeed_plugin_kernels_cpu.runtime import IS_BF16, Runtime, check_cache, refuse, runtime_of

if TYPE_CHECKING:
    from tokenspeed.interfaces.kernel import KernelContext

__all__ = ["Attention", "make_decode", "make_extend"]


class Attention:
    """Attention over one runtime. A row's result is bitwise the same in every batch, with and without ``prefix_intervals``."""

    def __init__(self, runtime: Runtime) -> None:
        self._decode = runtime.decode
        self._extend = runtime.extend

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        width: int,
        scale: float,
        layout: str,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        prefix_intervals: Any = None,
    ) -> torch.Tensor:
        """Flash decoding: q (R * width, Hq, D) -> (R * width, Hq, Dv); the ``width`` query tokens of a row are causal.

        page_table (R, P) int32, row stride allowed; seq_lens (R) int32 with the new tokens counted; ``window`` > 0 limits a query to the
        last so many positions, its own counted; sinks (Hq) float32 join the softmax without a value; prefix_intervals (n, 4) int32 on the
        host: (row_begin, row_end, first page index, pages), outer before inner; what rows share is then read once.
        Raises ``ValueError`` for what does not fit, ``IndexError`` for a length, page or interval out of range.
        """
        head = self._arguments("attention.decode", q, k_cache, v_cache, page_table, seq_lens, scale, layout, window, softcap, sinks)
        rows = seq_lens.shape[0]
        if width < 1 or q.shape[0] != rows * width:
            refuse("attention.decode", f"q must have {width} query tokens for each row of seq_lens", q=q, seq_lens=seq_lens)
        intervals = None
        if prefix_intervals is not None and len(prefix_intervals) > 0:
            intervals = torch.as_tensor(prefix_intervals)
            if intervals.dtype is not torch.int32 or intervals.dim() != 2 or intervals.shape[1] != 4 or not intervals.is_contiguous():
                refuse("attention.decode", "prefix_intervals must be contiguous int32 (n, 4)", prefix_intervals=intervals)
        out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[3]))
        address, count = (0, 0) if intervals is None else (intervals.data_ptr(), intervals.shape[0])
        self._decode(q.data_ptr(), out.data_ptr(), *head, width, address, count)
        return out

    def extend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        scale: float,
        layout: str,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of chunks over their prefix and themselves: q (T, Hq, D) -> (T, Hq, Dv).

        query_start (R + 1) int32: row r owns tokens query_start[r] to query_start[r + 1], the last of its seq_lens[r] positions. The rest
        and the errors as in ``decode``.
        """
        head = self._arguments("attention.extend", q, k_cache, v_cache, page_table, seq_lens, scale, layout, window, softcap, sinks)
        if query_start.dtype is not torch.int32 or query_start.shape != (seq_lens.shape[0] + 1,) or not query_start.is_contiguous():
            refuse("attention.extend", "query_start must be contiguous int32 (R + 1,)", query_start=query_start, seq_lens=seq_lens)
        out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[3]))
        self._extend(q.data_ptr(), out.data_ptr(), *head, query_start.data_ptr(), q.shape[0])
        return out

    @staticmethod
    def _arguments(
        kernel: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor,
        scale: float, layout: str, window: int, softcap: float, sinks: torch.Tensor | None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """The native arguments that both modes share, after q and out."""
        pages, page_size, kv_heads, key_dim, value_dim, hnd, cache_bf16 = check_cache(kernel, k_cache, v_cache, layout)
        bf16 = IS_BF16.get(q.dtype)
        if bf16 is None or q.dim() != 3 or not (q.is_cpu and q.is_contiguous()) or q.shape[2] != key_dim or q.shape[1] % kv_heads:
            refuse(kernel, f"q must be contiguous float32 or bfloat16 (T, a multiple of {kv_heads} heads, {key_dim})", q=q, k_cache=k_cache)
        if seq_lens.dtype is not torch.int32 or seq_lens.dim() != 1 or not seq_lens.is_contiguous():
            refuse(kernel, "seq_lens must be contiguous int32 (R,)", seq_lens=seq_lens)
        rows = seq_lens.shape[0]
        if page_table.dtype is not torch.int32 or page_table.dim() != 2 or page_table.shape[0] != rows:
            refuse(kernel, f"page_table must be int32 ({rows}, P)", page_table=page_table)
        columns = page_table.shape[1]
        stride, inner = page_table.stride()
        if inner != 1 and columns > 1:
            refuse(kernel, "the rows of page_table must be contiguous", page_table=page_table)
        if window < 0 or softcap < 0.0:
            raise ValueError(f"{kernel}: window ({window}) and softcap ({softcap}) must not be negative; 0 turns them off")
        sinks_address = 0
        if sinks is not None:
            if sinks.dtype is not torch.float32 or sinks.shape != (q.shape[1],) or not sinks.is_contiguous():
                refuse(kernel, f"sinks must be contiguous float32 ({q.shape[1]},)", sinks=sinks)
            sinks_address = sinks.data_ptr()
        return (
            bf16, q.shape[1], k_cache.data_ptr(), v_cache.data_ptr(), pages, page_size, kv_heads, key_dim, value_dim, hnd, cache_bf16,
            page_table.data_ptr(), stride, columns, seq_lens.data_ptr(), rows, scale, window, softcap, sinks_address,
        )  # fmt: skip


def make_decode(context: KernelContext) -> Callable[..., torch.Tensor]:
    """Factory of ``attention.decode``."""
    return Attention(runtime_of(context)).decode


def make_extend(context: KernelContext) -> Callable[..., torch.Tensor]:
    """Factory of ``attention.extend``."""
    return Attention(runtime_of(context)).extend

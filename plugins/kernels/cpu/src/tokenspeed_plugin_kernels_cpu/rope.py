"""Rotary embedding, alone and fused with the split of qkv rows and the paged write (C++: ``kernels_rows.h``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tokenspeed_plugin_kernels_cpu.runtime import IS_BF16, IS_INT64, Runtime, check_cache, refuse, runtime_of

if TYPE_CHECKING:
    from tokenspeed.interfaces.kernel import KernelContext

__all__ = ["Rope", "make_qkv_rope_write", "make_rotate"]

MAX_HEAD_DIM = 1024


class Rope:
    """Rotations over one runtime. cos_sin (max_pos, rotary_dim) is float32, first half cosines, second half sines; rotation pairs
    values i and i + rotary_dim / 2, or 2 i and 2 i + 1 where ``interleaved``; values from rotary_dim on are left alone."""

    def __init__(self, runtime: Runtime) -> None:
        self._rotate = runtime.rotate
        self._qkv_rope_write = runtime.qkv_rope_write

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, head_dim: int, interleaved: bool = False
    ) -> None:
        """In place on q (T, Hq * head_dim) and k (T, Hk * head_dim), row strides allowed; positions (T) int32 or int64.

        Raises ``ValueError`` for shapes or types that do not fit, ``IndexError`` for a position outside ``cos_sin``.
        """
        bf16 = IS_BF16.get(q.dtype)
        if bf16 is None or k.dtype is not q.dtype or q.dim() != 2 or k.dim() != 2 or q.shape[0] != k.shape[0] or not q.is_cpu:
            refuse("rope.rotate", "q (T, Hq * D) and k (T, Hk * D) must both be float32 or both bfloat16 on the CPU", q=q, k=k)
        tokens, q_width = q.shape
        k_width = k.shape[1]
        q_stride, q_inner = q.stride()
        k_stride, k_inner = k.stride()
        if q_inner != 1 or k_inner != 1 or head_dim < 1 or q_width % head_dim or k_width % head_dim:
            refuse("rope.rotate", f"rows must be contiguous and hold whole heads of {head_dim}", q=q, k=k)
        wide = self._check_table("rope.rotate", tokens, positions, cos_sin, head_dim)
        self._rotate(
            q.data_ptr(), q_stride, q_width // head_dim, k.data_ptr(), k_stride, k_width // head_dim, tokens, head_dim, bf16,
            positions.data_ptr(), wide, cos_sin.data_ptr(), cos_sin.shape[0], cos_sin.shape[1], interleaved,
        )  # fmt: skip

    def qkv_rope_write(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        layout: str,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 1e-6,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Split qkv (T, (Hq + 2 Hk) * D), norm heads where weights (D) are given, rotate, write k and v; returns q (T, Hq, D).

        slot_mapping (T) int64 is page * page_size + offset, -1 = not written. The cache may be of the other float type.
        Raises ``ValueError`` for shapes or types that do not fit, ``IndexError`` for a position or slot out of range.
        """
        name = "rope.qkv_rope_write"
        bf16 = IS_BF16.get(qkv.dtype)
        if bf16 is None or not (qkv.is_cpu and qkv.is_contiguous()) or qkv.dim() != 2 or qkv.shape[1] != (q_heads + 2 * kv_heads) * head_dim:
            refuse(name, f"qkv must be contiguous float32 or bfloat16 (T, ({q_heads} + 2 * {kv_heads}) * {head_dim})", qkv=qkv)
        tokens = qkv.shape[0]
        pages, page_size, heads, key_dim, value_dim, hnd, cache_bf16 = check_cache(name, k_cache, v_cache, layout)
        if heads != kv_heads or key_dim != head_dim or value_dim != head_dim:
            refuse(name, f"the {layout} caches must have {kv_heads} heads of {head_dim}", k_cache=k_cache, v_cache=v_cache)
        if slot_mapping.dtype is not torch.int64 or slot_mapping.shape != (tokens,) or not slot_mapping.is_contiguous():
            refuse(name, f"slot_mapping must be contiguous int64 ({tokens},)", slot_mapping=slot_mapping)
        for norm in (q_norm, k_norm):
            if norm is not None and (norm.dtype is not qkv.dtype or norm.shape != (head_dim,) or not norm.is_contiguous()):
                refuse(name, f"q_norm and k_norm must be contiguous ({head_dim},) of qkv's type", qkv=qkv, q_norm=q_norm, k_norm=k_norm)
        wide = self._check_table(name, tokens, positions, cos_sin, head_dim)
        q = qkv.new_empty((tokens, q_heads, head_dim))
        self._qkv_rope_write(
            qkv.data_ptr(), q.data_ptr(), tokens, q_heads, kv_heads, head_dim, bf16, positions.data_ptr(), wide, cos_sin.data_ptr(),
            cos_sin.shape[0], cos_sin.shape[1], interleaved, 0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(), eps, k_cache.data_ptr(), v_cache.data_ptr(), pages, page_size, hnd, cache_bf16,
            slot_mapping.data_ptr(),
        )  # fmt: skip
        return q

    @staticmethod
    def _check_table(kernel: str, tokens: int, positions: torch.Tensor, cos_sin: torch.Tensor, head_dim: int) -> bool:
        wide = IS_INT64.get(positions.dtype)
        if wide is None or positions.shape != (tokens,) or not positions.is_contiguous():
            refuse(kernel, f"positions must be contiguous int32 or int64 ({tokens},)", positions=positions)
        if cos_sin.dtype is not torch.float32 or cos_sin.dim() != 2 or not cos_sin.is_contiguous():
            refuse(kernel, "cos_sin must be contiguous float32 (max_pos, rotary_dim)", cos_sin=cos_sin)
        rotary_dim = cos_sin.shape[1]
        if rotary_dim % 2 or rotary_dim > head_dim or head_dim > MAX_HEAD_DIM:
            refuse(kernel, f"rotary_dim must be even and at most head_dim ({head_dim}), head_dim at most {MAX_HEAD_DIM}", cos_sin=cos_sin)
        return wide


def make_rotate(context: KernelContext) -> Callable[..., None]:
    """Factory of ``rope.rotate``."""
    return Rope(runtime_of(context)).rotate


def make_qkv_rope_write(context: KernelContext) -> Callable[..., torch.Tensor]:
    """Factory of ``rope.qkv_rope_write``."""
    return Rope(runtime_of(context)).qkv_rope_write

"""Rotary embedding, alone and fused with the split of qkv rows and the write to pages."""

from __future__ import annotations

import torch

from tokenspeed.builtin.kernels.cache import write
from tokenspeed.builtin.kernels.norm import rms_norm

__all__ = ["qkv_rope_write", "rotate"]


def rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    head_dim: int,
    interleaved: bool = False,
) -> None:
    """Rotate the first ``rotary_dim`` elements of every head in place: q (T, Hq * head_dim), k (T, Hk * head_dim), positions (T) int64,
    cos_sin (max_pos, rotary_dim) fp32."""
    rotary = cos_sin.shape[1]
    if rotary == 0:
        return
    cos, sin = cos_sin[positions].chunk(2, dim=-1)  # (T, rotary / 2)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    for x in (q, k):
        heads = x.view(x.shape[0], -1, head_dim)[..., :rotary]
        first, second = (heads[..., ::2], heads[..., 1::2]) if interleaved else heads.chunk(2, dim=-1)
        a, b = first.float(), second.float()
        rotated_a, rotated_b = a * cos - b * sin, b * cos + a * sin
        first.copy_(rotated_a)
        second.copy_(rotated_b)


def qkv_rope_write(
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
    gate: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Split fused rows qkv (T, (Hq + 2 Hk) * head_dim), norm the heads of q and k where weights are given, rotate them, store k and v in the pages of
    ``slot_mapping`` and return q (T, Hq, head_dim). With ``gate`` each query head is followed by its gate in qkv (T, (2 Hq + 2 Hk) * head_dim), and
    (q, gates (T, Hq, head_dim)) is returned."""
    tokens = qkv.shape[0]
    if gate:
        both = 2 * q_heads * head_dim
        queries, gates = qkv[:, :both].reshape(tokens, q_heads, 2, head_dim).unbind(2)
        qkv = torch.cat((queries.reshape(tokens, -1), qkv[:, both:]), dim=-1)
    heads = qkv.view(tokens, q_heads + 2 * kv_heads, head_dim)
    q, k, v = heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
    q = q.contiguous() if q_norm is None else rms_norm(q, q_norm, eps)
    k = k.contiguous() if k_norm is None else rms_norm(k, k_norm, eps)
    rotate(q.view(tokens, -1), k.view(tokens, -1), positions, cos_sin, head_dim, interleaved)
    write(k, v, k_cache, v_cache, slot_mapping, layout)
    return (q, gates.contiguous()) if gate else q

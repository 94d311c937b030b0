"""The write of latents into pages: both parts of a row in one pass, divided by a scale where pages are of fp8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_plugin_attention_mla.early import early_launch

__all__ = ["write_latent"]


@triton.jit(do_not_specialize=["tokens"])
def pack_rows(
    c_ptr, r_ptr, cache_ptr, slot_ptr, tokens, s_c, s_r, s_page, s_pos, page_size, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program writes BT tokens: ``c_ptr`` rows of RANK, ``r_ptr`` rows of ROPE behind them."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    slot = tl.load(slot_ptr + token, mask=token < tokens, other=-1)
    d = tl.arange(0, BR)
    e = tl.arange(0, BE)
    at = cache_ptr + slot // page_size * s_page + slot % page_size * s_pos
    c_mask = (slot >= 0)[:, None] & (d < RANK)[None, :]
    r_mask = (slot >= 0)[:, None] & (e < ROPE)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    c = tl.load(c_ptr + token[:, None] * s_c + d[None, :], mask=c_mask, other=0.0)
    r = tl.load(r_ptr + token[:, None] * s_r + e[None, :], mask=r_mask, other=0.0)
    if SCALED:
        c = c.to(tl.float32) / scale
        r = r.to(tl.float32) / scale
    to: tl.constexpr = cache_ptr.dtype.element_ty
    if to == tl.float8e4nv:
        # fp8 saturates at its largest value; NaN stays NaN.
        c = c.to(tl.float32)
        r = r.to(tl.float32)
        c = tl.where(c > 448.0, 448.0, tl.where(c < -448.0, -448.0, c))
        r = tl.where(r > 448.0, 448.0, tl.where(r < -448.0, -448.0, r))
    tl.store(at[:, None] + d[None, :], c.to(to), mask=c_mask)
    tl.store(at[:, None] + RANK + e[None, :], r.to(to), mask=r_mask)


def write_latent(
    latent: torch.Tensor,
    rope: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: str,
    scale: float = 1.0,
) -> None:
    """latent (T, R) and rope (T, E), row strides allowed, divided by ``scale``, go to the pages of ``slot_mapping`` (T) int64; -1 writes nothing."""
    tokens, rank = latent.shape
    if tokens == 0:
        return
    position = 1 if layout == "NHD" else 2
    each = 1 if tokens <= 1024 else 4
    pack_rows[(triton.cdiv(tokens, each),)](
        latent, rope, cache, slot_mapping, tokens, latent.stride(0), rope.stride(0), cache.stride(0), cache.stride(position), cache.shape[position], scale,
        RANK=rank, ROPE=rope.shape[1], BR=triton.next_power_of_2(rank), BE=triton.next_power_of_2(rope.shape[1]), BT=each, SCALED=scale != 1.0,
        num_warps=4, **early_launch(latent),
    )  # fmt: skip

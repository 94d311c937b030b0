"""``attention.decode`` and ``attention.extend`` on torch's scaled dot product attention. Signatures: ``tokenspeed.interfaces.kernel``.

Query heads that share a KV head become further query tokens of that head: (Hq, n) -> (Hk, Hq / Hk * n). So one call covers a group without
repeating keys and values.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["decode", "extend"]


def decode(
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
    prefix_intervals: object = None,  # noqa: ARG001 - an offer, and this kernel does not take it up (no feature shared_prefix)
) -> torch.Tensor:
    """All rows in one batch, padded to the longest: q (R * width, Hq, D) -> (R * width, Hq, Dv)."""
    _refuse(softcap, sinks)
    rows, longest = seq_lens.shape[0], int(seq_lens.max())
    if longest == 0:
        return q.new_zeros(*q.shape[:2], v_cache.shape[-1])
    last = seq_lens.long().unsqueeze(1)  # (R, 1)
    if window:
        # What lies behind the window of a row's first query token may be others' by now.
        key = (last - width - window + 1).clamp_min(0) + torch.arange(min(longest, window + width - 1))  # (R, S)
    else:
        key = torch.arange(longest).expand(rows, -1)
    # Positions past a row's end read its last one instead, which is its own: what other requests left in a page is not even multiplied by zero.
    at = torch.where(key < last, key, (last - 1).clamp_min(0))
    keys, values = (_gather(cache, page_table, at, layout) for cache in (k_cache, v_cache))
    query = last - width + torch.arange(width)  # (R, width) position of each query token
    seen = _visible(query.unsqueeze(-1), key.unsqueeze(1), window)  # (R, width, S)
    return _attend(q.view(rows, width, *q.shape[1:]), keys, values, seen, scale).flatten(0, 1)


def extend(
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
    """Row by row: q (T, Hq, D) -> (T, Hq, Dv)."""
    _refuse(softcap, sinks)
    out = q.new_zeros(*q.shape[:2], v_cache.shape[-1])
    starts = query_start.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if end == begin or length == 0:
            continue
        # With a window, what the first query token cannot see is not read at all.
        first = max(0, length - (end - begin) - window + 1) if window else 0
        key = torch.arange(first, length)
        keys, values = (
            _gather(cache, page_table[row : row + 1], key.unsqueeze(0), layout) for cache in (k_cache, v_cache)
        )
        query = torch.arange(length - (end - begin), length)
        seen = _visible(query.unsqueeze(-1), key, window)
        out[begin:end] = _attend(q[begin:end].unsqueeze(0), keys, values, seen.unsqueeze(0), scale)[0]
    return out


def _visible(query: torch.Tensor, key: torch.Tensor, window: int) -> torch.Tensor:
    """Whether the query token at each position reads each key."""
    seen = key <= query
    return seen & (key > query - window) if window else seen


def _gather(cache: torch.Tensor, page_table: torch.Tensor, at: torch.Tensor, layout: str) -> torch.Tensor:
    """Positions ``at`` (R, S) of each row as (R, Hk, S, D)."""
    page_size = cache.shape[1] if layout == "NHD" else cache.shape[2]
    # Rows without tokens have no pages either: whatever their table holds is replaced by a page that exists.
    page = torch.gather(page_table.long(), 1, at // page_size).clamp_(0, cache.shape[0] - 1)
    offset = at % page_size
    if layout == "NHD":
        tokens = cache.view(-1, *cache.shape[2:])  # (pages * page_size, Hk, D)
        rows: torch.Tensor = tokens.index_select(0, (page * page_size + offset).flatten())
        return rows.view(*at.shape, *cache.shape[2:]).transpose(1, 2)
    heads = cache.shape[1]
    lines = (page.unsqueeze(1) * heads + torch.arange(heads).view(1, -1, 1)) * page_size + offset.unsqueeze(
        1
    )  # (R, Hk, S)
    flat: torch.Tensor = cache.view(-1, cache.shape[-1]).index_select(0, lines.flatten())
    return flat.view(*lines.shape, cache.shape[-1])


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """q (R, n, Hq, D), k and v (R, Hk, S, D), seen (R, n, S) -> (R, n, Hq, Dv)."""
    rows, tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    # (R, n, Hk, G, D) -> (R, Hk, G * n, D)
    folded = (
        q.view(rows, tokens, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * tokens, dim)
    )
    mask = seen.repeat(1, group, 1).unsqueeze(1)  # (R, 1, G * n, S)
    out = functional.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    out = out.view(rows, kv_heads, group, tokens, -1).permute(0, 3, 1, 2, 4).reshape(rows, tokens, q_heads, -1)
    # A query token that sees nothing (a row without tokens) has no weights to speak of.
    return out.masked_fill(~seen.any(-1).view(rows, tokens, 1, 1), 0.0)


def _refuse(softcap: float, sinks: torch.Tensor | None) -> None:
    if softcap or sinks is not None:
        raise ValueError(
            "the sdpa kernels have neither soft cap nor sinks; request them as features, and another kernel is chosen"
        )

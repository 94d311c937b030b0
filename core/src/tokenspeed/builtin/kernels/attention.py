"""Attention over paged keys and values, row by row in fp32: the definition."""

from __future__ import annotations

import torch

__all__ = ["decode", "extend"]


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
    """Causal attention of rows of any length: q (T, Hq, D), page_table (R, P), seq_lens (R) with the new tokens counted, query_start (R + 1).

    The last query token of a row stands at position ``seq_lens - 1`` and reads keys up to its own position, at most ``window`` of them (0: all).
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[-1])
    starts = query_start.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if end > begin and length > 0:
            # Pages behind the window may be others' by now: they are not even masked, they are not read.
            first = max(0, length - (end - begin) - window + 1) if window else 0
            keys = _gather(k_cache, page_table[row], first, length, layout)
            values = _gather(v_cache, page_table[row], first, length, layout)
            out[begin:end] = _attend(q[begin:end], keys, values, scale, window, softcap, sinks).to(q.dtype)
    return out


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
    prefix_intervals: object = None,  # noqa: ARG001 - says what could be read once instead of once per row; the result is the same
) -> torch.Tensor:
    """``extend`` for rows of ``width`` query tokens each: q (R * width, Hq, D)."""
    query_start = torch.arange(seq_lens.shape[0] + 1) * width
    return extend(q, k_cache, v_cache, page_table, seq_lens, query_start, scale, layout, window, softcap, sinks)


def _gather(cache: torch.Tensor, pages: torch.Tensor, first: int, length: int, layout: str) -> torch.Tensor:
    """(length - first, Hk, D) fp32 of one row."""
    by_token = cache if layout == "NHD" else cache.transpose(1, 2)
    page_size = by_token.shape[1]
    begin, needed = first // page_size, -(-length // page_size)
    return (
        by_token[pages[begin:needed].long()]
        .flatten(0, 1)[first - begin * page_size : length - begin * page_size]
        .float()
    )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q (n, Hq, D), k (S, Hk, D), v (S, Hk, Dv) -> (n, Hq, Dv) fp32. The last query token stands where the last key does."""
    tokens, q_heads = q.shape[:2]
    length, kv_heads = k.shape[:2]
    k, v = (x.repeat_interleave(q_heads // kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,shd->hns", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(length - tokens, length, device=q.device).unsqueeze(1)  # position of each query token
    key = torch.arange(length, device=q.device)
    hidden = key > at
    if window:
        hidden |= key <= at - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        # A sink takes part in the softmax and has no value.
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, tokens, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :length].nan_to_num(0.0)  # NaN: no key to read
    return torch.einsum("hns,shd->nhd", weights, v)

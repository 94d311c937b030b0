"""Random draws from rows of logits: temperature, top-k, top-p, min-p, then Gumbel-max with counter-based noise.

The order of the filters is that of Hugging Face's ``generate``: top-k, top-p on what top-k left, min-p. Tokens that tie with the last one kept are kept
too, so that the result does not depend on how a sort breaks ties. A row with a filter draws by the Gumbel-max trick among the tokens that it keeps. Only
as many of the likeliest tokens are looked at as are needed to find where the filters end: ``HEAD`` of them first, more for the rows where
that is not enough.

A row without a filter first decides between its head, the ``HEAD`` likeliest tokens, and its tail by their mass with one uniform number; the Gumbel-max
trick then picks inside the part. That too is an exact draw, and noise for the whole vocabulary is needed only for the few rows that fall into
the tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.builtin.kernels.noise import gumbel_at, gumbel_row, uniform

__all__ = ["HEAD", "RandomRows", "draw"]

#: Size of the head. Part of the definition of a seeded draw.
HEAD = 64
#: Factor by which more tokens are looked at. torch's top-k over a vocabulary is quick up to 64 and about as slow as it gets from 1,024 on.
_MORE = 16

_NEVER = float("-inf")


@dataclass(frozen=True, kw_only=True)
class RandomRows:
    """Rows with a temperature. ``index`` (n) int64 among the sampling rows; the rest (n): fp64, ``top_k`` and ``seeds`` int64."""

    index: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor


def draw(logits: torch.Tensor, rows: RandomRows, positions: torch.Tensor) -> torch.Tensor:
    """Draw one token per row.

    Args:
        logits: (n, vocabulary) fp32 after bias, masks and penalties; the rows of ``rows.index``.
        positions: (n) int64, tokens the request had generated before.

    Returns:
        (n) int64. Rows whose logits hold NaN give an arbitrary id in range.
    """
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    vocab_size = logits.shape[1]
    filtered = ((rows.top_k > 0) & (rows.top_k < vocab_size)) | (rows.top_p < 1) | (rows.min_p > 0)
    plain = torch.nonzero(~filtered)[:, 0]
    if len(plain):
        tokens[plain] = _whole(_pick(logits, plain), _take(rows, plain), positions[plain])
    pending, size = torch.nonzero(filtered)[:, 0], HEAD
    while len(pending):
        some, params = _pick(logits, pending), _take(rows, pending)
        kept = _kept(some, params, min(size, vocab_size))
        noise = gumbel_at(params.seeds, positions[pending], kept.ids)
        best = (kept.values + noise).argmax(dim=-1, keepdim=True)
        tokens[pending] = kept.ids.gather(1, best)[:, 0]  # those that are not done are overwritten in the next round
        pending, size = pending[~kept.done], size * _MORE
    return tokens


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """Tokens that pass the filters: ``ids`` (n, k) int64, ``values`` (n, k) fp64 scaled logits with -inf where dropped.

    ``done`` (n) bool: the filters end among the tokens that were looked at.
    """

    ids: torch.Tensor
    values: torch.Tensor
    done: torch.Tensor


def _kept(logits: torch.Tensor, rows: RandomRows, size: int) -> _Kept:
    """Filter the ``size`` likeliest tokens of each row."""
    vocab_size = logits.shape[1]
    largest, ids = torch.topk(logits, size, dim=-1)
    values = (largest - largest[:, :1]).double() / rows.temperature[:, None]
    top_k_on = (rows.top_k > 0) & (rows.top_k < vocab_size)
    by_top_k = top_k_on & (rows.top_k <= size)
    k = torch.where(by_top_k, rows.top_k, size)
    keep = values >= values.gather(1, k[:, None] - 1)
    done = by_top_k | (size == vocab_size)

    # top-p counts mass among what top-k left: some of these, or the whole row
    mass = torch.exp(values).masked_fill(~keep, 0).sum(dim=-1)
    top_p_on = rows.top_p < 1
    if bool((top_p_on & ~done).any()):
        mass = torch.where(done, mass, _mass(logits, largest[:, :1], rows.temperature))
    p = torch.exp(values).masked_fill(~keep, 0)
    total = p.cumsum(dim=-1)
    share = (rows.top_p * mass)[:, None]
    nucleus = keep & (total - p < share)
    nucleus[:, 0] = True
    last = values.masked_fill(~nucleus, float("inf")).amin(dim=-1, keepdim=True)
    inside = (total[:, -1:] >= share) & (values[:, -1:] < last)
    keep &= (values >= last) | ~top_p_on[:, None]
    whole = ~top_k_on | by_top_k  # the mass is right: top-k is off or ends among these
    done |= top_p_on & inside[:, 0] & whole

    floor = torch.log(rows.min_p)[:, None]  # -inf where off; the likeliest token stands at 0
    keep &= values >= floor
    done |= (rows.min_p > 0) & (values[:, -1:] < floor)[:, 0] & (whole | ~top_p_on)
    width = int(keep.sum(dim=-1).max())  # values descend: what is kept comes first
    return _Kept(ids=ids[:, :width], values=values[:, :width].masked_fill(~keep[:, :width], _NEVER), done=done)


def _mass(logits: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(n) fp64, sum of exp over the row relative to its largest entry."""
    return ((logits - top) / temperature.float()[:, None]).exp_().sum(dim=-1, dtype=torch.float64)


def _whole(logits: torch.Tensor, rows: RandomRows, positions: torch.Tensor) -> torch.Tensor:
    """Rows without a filter: head or tail by mass, then Gumbel-max inside."""
    largest, ids = torch.topk(logits, min(HEAD, logits.shape[1]), dim=-1)
    top, temperature = largest[:, :1], rows.temperature[:, None]
    values = (largest - top).double() / temperature
    best = (values + gumbel_at(rows.seeds, positions, ids)).argmax(dim=-1, keepdim=True)
    tokens = ids.gather(1, best)[:, 0]
    share = torch.exp(values).sum(dim=-1) / _mass(logits, top, rows.temperature)
    fallen = torch.nonzero(uniform(rows.seeds, positions) >= share)[:, 0]
    if len(fallen):
        tail = ((logits[fallen] - top[fallen]).double() / temperature[fallen]).scatter_(1, ids[fallen], _NEVER)
        noise = gumbel_row(rows.seeds[fallen], positions[fallen], logits.shape[1])
        value, picked = (tail + noise).max(dim=-1)
        # Rounding can leave the tail with a sliver of mass and no token.
        tokens[fallen] = torch.where(value > _NEVER, picked, tokens[fallen])
    return tokens


def _pick(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Some rows; all of them without a copy."""
    return logits if len(index) == len(logits) else logits[index]


def _take(rows: RandomRows, index: torch.Tensor) -> RandomRows:
    if len(index) == len(rows.index):
        return rows
    return RandomRows(
        index=rows.index[index],
        temperature=rows.temperature[index],
        top_k=rows.top_k[index],
        top_p=rows.top_p[index],
        min_p=rows.min_p[index],
        seeds=rows.seeds[index],
    )

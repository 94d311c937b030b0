"""Random draws from rows of logits: temperature, top-k, top-p, min-p, then Gumbel-max with counter-based noise.

The order of the filters is that of Hugging Face's ``generate``: top-k, top-p on what top-k left, min-p. Tokens that tie with the last one kept are kept
too, so that the result does not depend on how a sort breaks ties.

Only the head, the ``HEAD`` likeliest tokens, is looked at where a filter ends inside it (the usual case). Where nothing ends inside it, one
uniform number first decides between head and tail by their mass; the Gumbel-max trick then picks inside the part. That is an exact draw
from the whole distribution, and noise for the whole vocabulary is needed only for the few rows that fall into the tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.runtime.noise import gumbel_at, gumbel_row, uniform
from tokenspeed.runtime.slot_sampling import RandomRows

__all__ = ["HEAD", "draw"]

#: Size of the head. Part of the definition of a seeded draw.
HEAD = 256

_NEVER = float("-inf")


def draw(logits: torch.Tensor, rows: RandomRows, positions: torch.Tensor) -> torch.Tensor:
    """Draw one token per row.

    Args:
        logits: (n, vocabulary) fp32 after bias, masks and penalties; the rows of ``rows.index``.
        positions: (n) int64, tokens the request had generated before.

    Returns:
        (n) int64. Rows whose logits hold NaN give an arbitrary id in range.
    """
    top = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - top) / rows.temperature.float()[:, None]
    head = _Head.of(scaled, rows)
    tokens = head.pick(rows.seeds, positions)
    if bool(head.closed.all()):
        return tokens
    for index in head.open_rows():
        tokens[index] = _open(scaled[index], _take(rows, index), positions[index], head.filtered[index])
    return tokens


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The likeliest tokens of each row. ``values`` (n, K) fp64 descending with dropped ones at -inf; ``ids`` (n, K) int64.

    ``closed`` (n) bool: every kept token is in the head. ``filtered`` (n) bool: some filter is on.
    """

    values: torch.Tensor
    ids: torch.Tensor
    closed: torch.Tensor
    filtered: torch.Tensor

    @classmethod
    def of(cls, scaled: torch.Tensor, rows: RandomRows) -> _Head:
        vocab_size = scaled.shape[1]
        size = min(HEAD, vocab_size)
        top, ids = torch.topk(scaled, size, dim=-1)
        values = top.double()
        top_k_on = (rows.top_k > 0) & (rows.top_k < vocab_size)
        by_top_k = top_k_on & (rows.top_k <= size)
        k = torch.where(by_top_k, rows.top_k, size)
        keep = values >= values.gather(1, k[:, None] - 1)
        closed = by_top_k | (size == vocab_size)

        # top-p counts mass among what top-k left: inside the head, or the whole row
        mass = torch.logsumexp(values.masked_fill(~keep, _NEVER), dim=-1)
        if not bool(closed.all()):
            mass = torch.where(closed, mass, torch.logsumexp(scaled, dim=-1).double())
        kept, ends = _nucleus(values, keep, mass, rows.top_p)
        top_p_on = rows.top_p < 1
        keep &= kept | ~top_p_on[:, None]
        whole = ~top_k_on | by_top_k  # mass above is right: top-k is off or ends in the head
        closed |= top_p_on & ends & whole

        floor = torch.log(rows.min_p)[:, None]  # -inf where off; the likeliest token stands at 0
        keep &= values >= floor
        closed |= (rows.min_p > 0) & (values[:, -1:] < floor)[:, 0] & (whole | ~top_p_on)
        filtered = top_k_on | top_p_on | (rows.min_p > 0)
        return cls(values=values.masked_fill(~keep, _NEVER), ids=ids, closed=closed, filtered=filtered)

    def pick(self, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Gumbel-max among the kept tokens of the head."""
        best = (self.values + gumbel_at(seeds, positions, self.ids)).argmax(dim=-1, keepdim=True)
        return self.ids.gather(1, best)[:, 0]

    def open_rows(self) -> list[torch.Tensor]:
        """Index tensors of the rows that are not closed: those without a filter, and those whose filters end past the head."""
        parts = [torch.nonzero(~self.closed & ~self.filtered)[:, 0], torch.nonzero(~self.closed & self.filtered)[:, 0]]
        return [part for part in parts if len(part)]


def _nucleus(
    values: torch.Tensor, keep: torch.Tensor, mass: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest set of descending ``values`` whose probability reaches ``top_p``, with the ties of its last member; and whether it ends inside."""
    p = torch.exp(values.masked_fill(~keep, _NEVER) - mass[:, None])
    total = p.cumsum(dim=-1)
    before = total - p
    chosen = keep & (before < top_p[:, None])
    chosen[:, 0] = True
    last = values.masked_fill(~chosen, float("inf")).amin(dim=-1, keepdim=True)
    return values >= last, (total[:, -1] >= top_p) & (values[:, -1:] < last)[:, 0]


def _take(rows: RandomRows, index: torch.Tensor) -> RandomRows:
    return RandomRows(
        index=rows.index[index],
        temperature=rows.temperature[index],
        top_k=rows.top_k[index],
        top_p=rows.top_p[index],
        min_p=rows.min_p[index],
        seeds=rows.seeds[index],
    )


def _open(scaled: torch.Tensor, rows: RandomRows, positions: torch.Tensor, filtered: torch.Tensor) -> torch.Tensor:
    """Rows whose kept tokens reach past the head: head or tail by mass, then Gumbel-max inside."""
    if bool(filtered.any()):
        scaled = _filter(scaled, rows)
    values, ids = torch.topk(scaled, min(HEAD, scaled.shape[1]), dim=-1)
    head_values = values.double()
    share = torch.exp(torch.logsumexp(head_values, dim=-1) - torch.logsumexp(scaled, dim=-1).double())
    in_tail = uniform(rows.seeds, positions) >= share
    best = (head_values + gumbel_at(rows.seeds, positions, ids)).argmax(dim=-1, keepdim=True)
    tokens = ids.gather(1, best)[:, 0]
    fallen = torch.nonzero(in_tail)[:, 0]
    if len(fallen):
        tail = scaled[fallen].scatter(1, ids[fallen], _NEVER).double()
        value, picked = (tail + gumbel_row(rows.seeds[fallen], positions[fallen], scaled.shape[1])).max(dim=-1)
        # Rounding can leave the tail with a sliver of mass and no token.
        tokens[fallen] = torch.where(value > _NEVER, picked, tokens[fallen])
    return tokens


def _filter(scaled: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    """Apply the filters over the whole row by sorting it: (n, vocabulary) with dropped tokens at -inf."""
    vocab_size = scaled.shape[1]
    values = scaled.double().sort(dim=-1, descending=True).values
    k = torch.where((rows.top_k > 0) & (rows.top_k < vocab_size), rows.top_k, vocab_size)
    keep = values >= values.gather(1, k[:, None] - 1)
    mass = torch.logsumexp(values.masked_fill(~keep, _NEVER), dim=-1)
    kept, _ = _nucleus(values, keep, mass, rows.top_p)
    keep &= kept | (rows.top_p >= 1)[:, None]
    keep &= values >= torch.log(rows.min_p)[:, None]
    last = values.masked_fill(~keep, float("inf")).amin(dim=-1, keepdim=True)
    return scaled.masked_fill(scaled.double() < last, _NEVER)

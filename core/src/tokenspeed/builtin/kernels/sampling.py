"""Choices over logits."""

from __future__ import annotations

import torch

from tokenspeed.builtin.kernels.draw import RandomRows
from tokenspeed.builtin.kernels.draw import draw as draw_rows

__all__ = ["apply_bitmask", "argmax", "draw"]


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the largest of each row (R, V) -> (R) int64; the lowest index wins a tie, a row with NaN yields -1."""
    best = logits.max(dim=-1, keepdim=True).values
    # argmax of booleans: the first True.
    first = (logits == best).int().argmax(dim=-1)
    return torch.where(logits.isnan().any(dim=-1), -1, first)


def draw(
    logits: torch.Tensor,
    index: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Seeded draws from the rows ``index`` (n) of logits (R, V): the module ``draw``, which see. Waits for the device where the rows are there."""
    rows = RandomRows(index=index, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seeds)
    some = logits if len(index) == len(logits) else logits[index]
    return draw_rows(some.float(), rows, positions)


def apply_bitmask(logits: torch.Tensor, bits: torch.Tensor, rows: torch.Tensor) -> None:
    """Set logits (R, V) of ``rows`` (n) to -inf in place where ``bits`` (n, ceil(V / 32)) int32 has a 0; bit i % 32 of word i // 32 is token i."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))

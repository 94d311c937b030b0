"""Choices over logits."""

from __future__ import annotations

import torch

__all__ = ["argmax"]


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the largest of each row (R, V) -> (R) int64; the lowest index wins a tie, a row with NaN yields -1."""
    best = logits.max(dim=-1, keepdim=True).values
    # argmax of booleans: the first True.
    first = (logits == best).int().argmax(dim=-1)
    return torch.where(logits.isnan().any(dim=-1), -1, first)

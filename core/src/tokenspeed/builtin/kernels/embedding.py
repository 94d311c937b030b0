"""Table look-up."""

from __future__ import annotations

import torch

__all__ = ["lookup"]


def lookup(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows ``ids`` (T) of weight (V, H) -> (T, H)."""
    return weight[ids]

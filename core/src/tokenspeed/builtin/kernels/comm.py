"""Collectives over a process group of torch, ``None`` being a group of one: every rank gets the same bits, sums being taken in fp32."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum of every rank's ``x``, in place: gathered and added in rank order, so that no algorithm of the library decides the rounding."""
    if group is not None:
        parts = _gathered(x, group)
        x.copy_(torch.stack([part.float() for part in parts]).sum(0))
    return x


def all_gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Every rank's ``x`` (T, N) side by side in rank order: (T, size * N)."""
    return x.clone() if group is None else torch.cat(_gathered(x, group), dim=-1)


def reduce_scatter(x: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's rows of the sum: ``x`` (size * T, N) of each rank -> (T, N), rank r having rows r * T on. ``x`` is left alone."""
    if group is None:
        return x.clone()
    rows = x.shape[0] // group.size()
    return all_reduce(x.clone(), group)[group.rank() * rows : (group.rank() + 1) * rows]


def _gathered(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
    parts = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(group.size())]
    group.allgather([parts], [x.contiguous()]).wait()
    return parts

"""Mixtures of experts: which experts a token goes to, and what they make of it, expert by expert."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["experts", "route"]


def route(
    logits: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    group_best: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` experts of each row of logits (T, E): weights (T, top_k) fp32 and experts (T, top_k) int64, the highest score first, the lower index
    of equals.

    A score is the softmax over all experts, or each one's sigmoid. ``bias`` (E) fp32 moves the choice and not the weights. ``renormalize`` makes weights sum
    to one. Of several ``groups``, equal blocks of experts, those of ``kept_groups`` can be chosen: the highest sums of their ``group_best`` best.
    """
    x = logits.float()
    scores = torch.sigmoid(x) if scoring == "sigmoid" else torch.softmax(x, dim=-1)
    ranked = scores if bias is None else scores + bias
    if groups > 1:
        blocks = ranked.view(x.shape[0], groups, -1)
        best = blocks.topk(group_best, dim=-1).values.sum(dim=-1)
        kept = best.argsort(dim=-1, descending=True, stable=True)[:, :kept_groups]
        dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        ranked = blocks.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = ranked.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """SwiGLU of each row's experts, summed by its weights in fp32: x (T, H), gate_up (E, 2 I, H) with gate rows before up rows, down (E, H, I), weights
    (T, k) fp32, chosen (T, k) int64 (-1: none) -> (T, H)."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        made = functional.linear(functional.silu(gate.float()).to(x.dtype) * up, down[expert])
        out.index_add_(0, rows, made.float() * weights[rows, places].unsqueeze(-1))
    return out.to(x.dtype)

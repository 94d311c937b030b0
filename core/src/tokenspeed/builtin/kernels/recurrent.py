"""States of recurrent layers: copied, zeroed, and carried through a gated linear recurrence token by token."""

from __future__ import annotations

import torch

__all__ = ["copy", "gated_linear", "zero"]


def copy(states: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """State ``target[i]`` becomes state ``source[i]``: ``cache.copy`` over states (N, ...). The host waits for a device: it reads which are meant."""
    # not cache.copy: indexed assignment, which pages of any type need, takes up to twice as long on states of a megabyte
    kept = (source >= 0) & (target >= 0)
    states.index_copy_(0, target[kept], states.index_select(0, source[kept]))


def zero(states: torch.Tensor, target: torch.Tensor) -> None:
    """States ``target`` (n) become zeros: ``cache.zero`` over states (N, ...). The host waits as in ``copy``."""
    states.index_fill_(0, target[target >= 0], 0)


def gated_linear(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Gated linear attention (Yang et al. 2023, arXiv 2312.06635): of each head S = diag(decay_t) S + k_t v_t^T and out_t = scale * S^T q_t, in fp32.

    q, k and decay (T, H, K), decay in fp32 and of one size where a head has but one (T, H, 1); v (T, H, V); states (N, H, K, V) fp32, that of ``slots[r]``
    read before row r and left as it is after; slots (R) int64, distinct; query_start (R + 1) int32. Returns (T, H, V).
    """
    out = torch.empty_like(v)
    starts = query_start.tolist()
    for row, slot in enumerate(slots.tolist()):
        state = states[slot].clone()  # (H, K, V)
        for t in range(starts[row], starts[row + 1]):
            state = decay[t].float().unsqueeze(-1) * state + k[t].float().unsqueeze(-1) * v[t].float().unsqueeze(1)
            out[t] = (scale * torch.einsum("hkv,hk->hv", state, q[t].float())).to(v.dtype)
        states[slot] = state
    return out

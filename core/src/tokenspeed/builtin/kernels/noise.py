"""Counter-based random numbers: noise is a pure function of (seed, position, token), whatever else the batch holds.

The generator is Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Its key is the request's
64-bit seed. The counter's four words are

    word 0   token id // 4 (the token's number is output word ``id % 4``), or 0 for the choice between head and tail
    word 1   sampling position: tokens the request had generated before
    word 2   purpose: 0 choice between head and tail, 1 Gumbel noise of a token
    word 3   0

so a draw is repeated exactly after a retraction, in another batch, under overlap and on every tensor parallel rank.
"""

from __future__ import annotations

import torch

__all__ = ["gumbel_at", "gumbel_row", "philox", "uniform"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10

_CHOICE = 0
_TOKEN = 1

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox-4x32-10 on int64 tensors that hold 32-bit words; shapes broadcast.

    Args:
        counter: four words.
        key: two words.

    Returns:
        Four words, int64 in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps in int64; its 64 bits are right, and masking after the shift makes it a logical one.
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _key(seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return seeds & _MASK, (seeds >> 32) & _MASK


def _unit(words: torch.Tensor) -> torch.Tensor:
    """Words to fp64 in the open interval (0, 1)."""
    return (words.double() + 0.5) * 2.0**-32


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    return -torch.log(-torch.log(_unit(words)))


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One fp64 number in (0, 1) per row for the choice between head and tail; ``seeds`` and ``positions`` are (R) int64."""
    zero = torch.zeros_like(positions)
    return _unit(philox((zero, positions & _MASK, zero + _CHOICE, zero), _key(seeds))[0])


def gumbel_at(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise of chosen tokens: ``seeds`` and ``positions`` (R) int64, ``ids`` (R, K) int64 -> (R, K) fp64."""
    zero = torch.zeros_like(positions)[:, None]
    k0, k1 = _key(seeds)
    words = philox((ids >> 2, (positions & _MASK)[:, None], zero + _TOKEN, zero), (k0[:, None], k1[:, None]))
    return _gumbel(torch.stack(words, dim=-1).gather(-1, (ids & 3)[..., None])[..., 0])


def gumbel_row(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gumbel noise of every token: (R, vocabulary) fp64, equal to ``gumbel_at`` of every id at a quarter of its cost."""
    zero = torch.zeros_like(positions)[:, None]
    k0, k1 = _key(seeds)
    blocks = torch.arange((vocab_size + 3) // 4, device=seeds.device)[None, :]
    words = philox((blocks, (positions & _MASK)[:, None], zero + _TOKEN, zero), (k0[:, None], k1[:, None]))
    return _gumbel(torch.stack(words, dim=-1).reshape(len(seeds), -1)[:, :vocab_size])

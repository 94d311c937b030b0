"""How tensors are spread over the ranks of a parallel group, and what a layer may ask of its group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tokenspeed.errors import ConfigError

__all__ = ["GROUP_NAMES", "HeadShard", "ParallelGroup", "ParallelGroups", "ShardSlice", "shard_heads", "shard_slice"]

GROUP_NAMES = ("attn", "dense", "moe")


class ParallelGroup:
    """One rank's view of a group of ranks that share layers. This class is the group of one; the runtime derives one that talks."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size = size
        self.rank = rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of every rank's ``x``; may work in place. The same bits on every rank."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's ``x`` (T, N), side by side along the last axis in rank order: (T, size * N)."""
        return x


class ParallelGroups:
    """The groups of a rank by name (``attn``, ``dense``, ``moe``); names left out are groups of one."""

    def __init__(self, groups: Mapping[str, ParallelGroup] | None = None) -> None:
        given = dict(groups or {})
        unknown = sorted(set(given) - set(GROUP_NAMES))
        if unknown:
            raise ValueError(f"no parallel group is named {unknown[0]!r}; groups are {', '.join(GROUP_NAMES)}")
        self._groups = {name: given.get(name) or ParallelGroup() for name in GROUP_NAMES}

    def __getitem__(self, name: str) -> ParallelGroup:
        try:
            return self._groups[name]
        except KeyError:
            raise ValueError(f"no parallel group is named {name!r}; groups are {', '.join(GROUP_NAMES)}") from None


@dataclass(frozen=True)
class ShardSlice:
    """This rank's part of an axis: ``local`` elements here, of which the first ``count`` are the whole's from ``begin`` on and the rest are zeros."""

    local: int
    begin: int
    count: int


def shard_slice(size: int, units: int, rank: int, ranks: int) -> ShardSlice:
    """Cut an axis of ``size`` elements in ``units`` equal blocks and deal them out in order, the same number of places to every rank.

    With ``units >= ranks`` a rank has ``ceil(units / ranks)`` places; places past the last block are padding, so that every rank has the same shapes.
    With ``units < ranks`` neighbouring ranks hold copies of one block.

    Raises:
        ConfigError: ``units`` neither covers nor divides the ranks.
        ValueError: ``units`` does not divide ``size``.
    """
    if units < 1 or size % units:
        raise ValueError(f"an axis of {size} cannot be cut in {units} equal blocks")
    block = size // units
    if units < ranks:
        if ranks % units:
            raise ConfigError(
                f"{units} blocks cannot be shared evenly by {ranks} ranks; choose a parallel size that {units} divides or that is at most {units}"
            )
        return ShardSlice(block, rank // (ranks // units) * block, block)
    places = -(-units // ranks)
    begin = min(rank * places, units)
    return ShardSlice(places * block, begin * block, (min(begin + places, units) - begin) * block)


@dataclass(frozen=True)
class HeadShard:
    """Attention heads of one rank.

    Attributes:
        q_heads: query heads of a rank, padding included; ``kv_heads`` KV heads.
        q_units: ``units`` of the query (and output) projection; ``kv_units`` of the key and value projections.
    """

    q_heads: int
    kv_heads: int
    q_units: int
    kv_units: int


def shard_heads(q_heads: int, kv_heads: int, ranks: int) -> HeadShard:
    """Deal out heads so that a KV head stays with its query heads.

    With at least as many KV heads as ranks, whole groups (a KV head and its query heads) are dealt out, the last rank perhaps padded with heads whose
    weights are zero. With fewer, KV heads are copied and query heads divided.

    Raises:
        ConfigError: the heads cannot be dealt out.
    """
    if kv_heads < 1 or q_heads % kv_heads:
        raise ConfigError(f"{q_heads} query heads cannot share {kv_heads} KV heads evenly")
    if kv_heads >= ranks:
        places = -(-kv_heads // ranks)
        return HeadShard(places * (q_heads // kv_heads), places, kv_heads, kv_heads)
    if ranks % kv_heads or q_heads % ranks:
        raise ConfigError(
            f"{q_heads} query heads over {kv_heads} KV heads cannot be dealt out to {ranks} ranks; choose a smaller tensor parallel size"
        )
    return HeadShard(q_heads // ranks, 1, ranks, kv_heads)

"""Parallel groups that talk: collectives over ``torch.distributed``'s process groups, made without addresses, ports or global state.

Ranks of one host meet through a file in the engine's private directory. Gloo's sockets are bound to the loopback interface; ranks on several
hosts need another rendezvous and are not supported yet.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenspeed.errors import ConfigError
from tokenspeed.layers.parallel import GROUP_NAMES, ParallelGroup, ParallelGroups

__all__ = ["TalkingGroup", "join_ranks"]

_LOOPBACK = "127.0.0.1"
#: A step's collective that takes longer means a peer is stuck; a peer that died is noticed at once by other means.
_TIMEOUT = timedelta(minutes=5)


class TalkingGroup(ParallelGroup):
    """A group of several ranks over one process group."""

    def __init__(self, backend: dist.ProcessGroup, size: int, rank: int) -> None:
        super().__init__(size, rank)
        self._backend = backend

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum in place; each part is summed by one rank and sent to all, so that every rank holds the same bits."""
        x = x.contiguous()
        self._backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See ``ParallelGroup``."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._backend.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=-1)

    def smallest(self, value: int) -> int:
        """The smallest ``value`` of any rank."""
        shared = torch.tensor([value])
        gathered = [torch.empty_like(shared) for _ in range(self.size)]
        self._backend.allgather([gathered], [shared]).wait()
        return min(int(other) for other in gathered)


def join_ranks(backend: str, *, directory: Path, rank: int, size: int) -> tuple[ParallelGroups, TalkingGroup]:
    """Wait for all ranks and form the groups; all three (attention, dense, experts) span all ranks.

    Args:
        backend: ``Platform.collective_backend``.
        directory: private directory shared by the ranks.

    Raises:
        ConfigError: the backend cannot be used here.
    """
    if backend != "gloo":
        raise ConfigError(
            f"tensor parallel ranks over {backend!r} are not supported yet; use --tensor-parallel-size 1 on this platform"
        )
    store: Any = dist.FileStore(str(directory / "rendezvous"), size)  # type: ignore[attr-defined]  # missing in torch's stubs
    store.set_timeout(_TIMEOUT)
    # torch.distributed.init_process_group would bind to whatever the host's name resolves to, and keep its state in the process.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]
    options._timeout = _TIMEOUT
    group = TalkingGroup(gloo(store, rank, size, options), size, rank)
    return ParallelGroups(dict.fromkeys(GROUP_NAMES, group)), group

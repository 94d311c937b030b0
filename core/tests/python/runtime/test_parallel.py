"""Ranks meet without ports or addresses, and a collective gives every rank the same bits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.errors import ConfigError
from tokenspeed.runtime.parallel import join_ranks


def test_collectives_of_three_ranks(tmp_path: Path) -> None:
    size = 3
    parts = [torch.randn(5, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    results: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        groups, everyone = join_ranks("gloo", directory=tmp_path, rank=rank, size=size)
        group = groups["attn"]
        assert (group.size, group.rank) == (size, rank)
        summed = groups["dense"].all_reduce(parts[rank].t().contiguous().t())  # any strides
        results[rank] = (summed, group.all_gather(parts[rank]), everyone.smallest(10 - rank))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for summed, gathered, smallest in results:
        assert torch.equal(summed, results[0][0])
        assert torch.allclose(summed, torch.stack(parts).sum(0))
        assert torch.equal(gathered, torch.cat(parts, dim=-1))
        assert smallest == 8


def test_a_backend_that_does_not_work_yet_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nccl"):
        join_ranks("nccl", directory=tmp_path, rank=0, size=2)

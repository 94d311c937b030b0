"""Cache operations of several ranks: told when all have answered, as good as the worst, and the same on each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from tokenspeed.engine.rank_caches import Answers, RankCaches
from tokenspeed.engine.ranks import pack_plan, unpack_plan
from tokenspeed.runtime.cache_ops import FIELDS, CacheOps
from tokenspeed.runtime.plan import PlanArrays


class Scripted:
    """Rank 0's own executor, as far as ``RankCaches`` knows it: each operation is told of once."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, int]] = []
        self.in_flight = 0

    def finished(self) -> list[tuple[int, int]]:
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None:
        pass


def test_an_operation_is_complete_when_all_ranks_have_answered_and_as_good_as_the_worst(tmp_path: Path) -> None:
    own = Scripted()
    address = f"ipc://{tmp_path}/answers"
    caches = RankCaches(own, address, 3)  # type: ignore[arg-type]
    with zmq.Context() as context:
        first, second = Answers(context, address), Answers(context, address)
        own.ended = [(1, 5), (2, 5)]
        first.send([(1, 3), (2, 5)])
        first.send([])
        assert caches.finished() == []
        assert caches.in_flight == 2
        second.send([(2, 5)])
        assert caches.wait([2]) == {2: 5}
        assert caches.finished() == [(2, 5)]
        # Rank 0 has told of its own part long ago.
        second.send([(1, 4)])
        assert caches.wait([1]) == {1: 3}
        assert caches.finished() == [(1, 3)]
        assert caches.in_flight == 0
        first.close()
        second.close()
    caches.close()


@pytest.mark.parametrize("own_first", [True, False])
def test_what_was_told_of_before_it_is_waited_for_is_still_known(tmp_path: Path, own_first: bool) -> None:
    """With overlap ``finished`` may collect a load-back before its plan is advanced: on rank 0 first or last, and never on all ranks until the wait."""
    own = Scripted()
    address = f"ipc://{tmp_path}/answers"
    caches = RankCaches(own, address, 2)  # type: ignore[arg-type]
    with zmq.Context() as context:
        other = Answers(context, address)
        if own_first:
            own.ended = [(7, 4)]
            assert caches.finished() == []
            other.send([(7, 2)])
        else:
            other.send([(7, 2)])
            while not caches._partial:
                assert caches.finished() == []
            own.ended = [(7, 4)]
        assert caches.wait([7]) == {7: 2}
        assert caches.finished() == [(7, 2)]
        assert caches.finished() == []
        other.close()
    caches.close()


def test_cache_operations_travel_to_the_other_ranks() -> None:
    arrays: dict[str, Any] = {
        name: np.arange(32, dtype=np.uint8).reshape(2, 16)
        if name.endswith("_hash")
        else np.arange(2, dtype=np.int64 if name.endswith("_op") else np.int32)
        for name in FIELDS
    }
    ops = CacheOps(**arrays)
    nothing = np.zeros(0, dtype=np.int32)
    names = ("slots", "context_lens", "query_lens", "input_ids", "flags", "output_lens")
    deltas = ("delta_group", "delta_slot", "delta_index", "delta_page", "prefix_intervals")
    plan = PlanArrays(num_rows=0, num_extend_rows=0, num_tokens=0, **dict.fromkeys((*names, *deltas), nothing))
    there = unpack_plan(pack_plan(plan, [], ops))
    assert there is not None
    assert there[0].cache_ops is not None
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(there[0].cache_ops, name), arrays[name])
    bare = unpack_plan(pack_plan(plan, []))
    assert bare is not None
    assert bare[0].cache_ops is None

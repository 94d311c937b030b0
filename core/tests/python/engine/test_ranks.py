"""A plan crosses to other ranks whole, and they execute exactly what rank 0 executes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from tokenspeed.engine.ranks import FollowerLoop, LeaderExecutor, PlanSender, pack_plan, unpack_plan
from tokenspeed.errors import EngineError
from tokenspeed.messages import SamplingParams
from tokenspeed.runtime.plan import PlanArrays, SlotRequest


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


PLAN = PlanArrays(
    num_rows=2,
    num_extend_rows=1,
    num_tokens=4,
    slots=ints(3, 1),
    context_lens=ints(0, 9),
    query_lens=ints(3, 1),
    input_ids=ints(5, 6, 7, -1),
    flags=ints(3, 1),
    output_lens=ints(0, 4),
    delta_group=ints(0),
    delta_slot=ints(3),
    delta_index=ints(0),
    delta_page=ints(8),
    prefix_intervals=np.array([[0, 2, 0, 1], [1, 2, 1, 1]], dtype=np.int32),
)
NEW = [SlotRequest(3, SamplingParams(9, temperature=0.5), -7, (1, 2), b"abcd")]


def assert_same(plan: PlanArrays, other: PlanArrays) -> None:
    for name in PlanArrays.__dataclass_fields__:
        assert np.array_equal(getattr(plan, name), getattr(other, name)), name


def test_a_plan_survives_packing() -> None:
    unpacked = unpack_plan(pack_plan(PLAN, NEW))
    assert unpacked is not None
    assert_same(unpacked[0], PLAN)
    assert unpacked[1] == NEW


def test_a_plan_without_rows_is_not_the_end() -> None:
    """Its page-table changes matter on every rank."""
    empty = {name: ints() for name in ("slots", "context_lens", "query_lens", "input_ids", "flags", "output_lens")}
    plan = replace(
        PLAN, num_rows=0, num_extend_rows=0, num_tokens=0, prefix_intervals=np.zeros((0, 4), dtype=np.int32), **empty
    )
    unpacked = unpack_plan(pack_plan(plan, []))
    assert unpacked is not None
    assert_same(unpacked[0], plan)
    assert unpack_plan(b"") is None


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[PlanArrays, list[SlotRequest]]] = []

    def execute(self, plan: Any, new: Any = ()) -> Any:
        self.seen.append((plan, list(new)))
        return SimpleNamespace(done=True)


def test_followers_execute_what_the_leader_executes_until_told_to_end(tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/plans-{rank}" for rank in (1, 2)]
    sender = PlanSender(addresses)
    leader, followers, ended = Recorder(), [Recorder(), Recorder()], []
    loops = [
        FollowerLoop(recorder, address, on_end=lambda: ended.append(1))  # type: ignore[arg-type]
        for recorder, address in zip(followers, addresses, strict=True)
    ]
    threads = [threading.Thread(target=loop.run) for loop in loops]
    for thread in threads:
        thread.start()
    executor = LeaderExecutor(leader, sender)  # type: ignore[arg-type]
    executor.execute(PLAN, NEW)
    executor.execute(PLAN)
    sender.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert ended == [1, 1]
    for follower in followers:
        assert [new for _, new in follower.seen] == [NEW, []]
        assert_same(follower.seen[0][0], PLAN)


def test_a_frame_that_is_no_plan_ends_the_follower_loudly(tmp_path: Path) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.bind(f"ipc://{tmp_path}/plans-1")
    loop = FollowerLoop(Recorder(), f"ipc://{tmp_path}/plans-1", on_end=lambda: None)  # type: ignore[arg-type]
    socket.send(b"\x00")
    with pytest.raises(EngineError, match="no plan"):
        loop.run()
    context.destroy(0)

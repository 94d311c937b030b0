"""What ``StreamCopies`` queues and tells, on a device that carries out everything at once. The order of a real stream is tested on a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.runtime import stream_copies
from tokenspeed.runtime.host_pool import HostPool
from tokenspeed.runtime.kv_pool import KVPool
from tokenspeed.runtime.page_copies import PageMove
from tokenspeed.runtime.stream_copies import StreamCopies, staging_bytes
from tokenspeed.testing.harness import kernel_registry
from tokenspeed.types import CacheGroup, KVLayout

PAGES, LAYERS = 12, 26
GROUPS = (
    CacheGroup(kind="full", layers=(*range(LAYERS - 1),), kv_heads=2, head_dim=8, v_head_dim=4),
    CacheGroup(kind="window", layers=(LAYERS - 1,), kv_heads=1, head_dim=16, v_head_dim=16, window=8),
    CacheGroup(
        kind="recurrent",
        layers=(LAYERS, LAYERS + 1),
        states=((3, 5), ()),
        state_dtypes=("float32", "bfloat16"),
        interval=8,
    ),
    CacheGroup(kind="mla", layers=(LAYERS + 2,), kv_heads=1, head_dim=6, v_head_dim=4),
)


class Stream:
    """Also an event: always there, always over."""

    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class Bench:
    def __init__(self) -> None:
        self.pool = KVPool(
            GROUPS,
            select_kernel=kernel_registry().select,
            layout=KVLayout.HND,
            page_sizes=[4, 4, 0, 4],
            num_pages=[PAGES] * 4,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for tensor in self.pool.tensors:
            tensor.normal_()
        self.before = [tensor.clone() for tensor in self.pool.tensors]
        self.done: dict[int, int] = {}
        self.host = HostPool(self.pool, [PAGES] * 4, pinned=False)
        self.copies = StreamCopies(self.host, self.done.__setitem__, device=torch.device("cpu"))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    return Bench()


def moves(number: int = 1) -> list[PageMove]:
    """Three operations, of one group each."""
    pages = np.arange(1, PAGES, dtype=np.int32)
    return [PageMove(number=number + group, group=group, device=pages, host=pages[::-1].copy()) for group in range(3)]


def test_pages_of_all_layers_and_groups_come_back(bench: Bench) -> None:
    bench.copies.write_back(moves(1))
    for tensor in bench.pool.tensors:
        tensor[1:PAGES] = 0
    bench.copies.load_back(moves(4))
    bench.copies.poll()
    assert bench.done == dict.fromkeys(range(1, 7), 11)
    for tensor, before in zip(bench.pool.tensors, bench.before, strict=True):
        torch.testing.assert_close(tensor, before, rtol=0, atol=0)


def test_pages_are_named_to_the_device_once_a_plan(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once for each slice of layers."""
    uploads: Counter[str] = Counter()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: uploads.update(["pinned"]) or self)
    bench.copies.load_back(moves())
    assert uploads["pinned"] == 1
    bench.copies.write_back(moves())
    assert uploads["pinned"] == 2


@pytest.mark.parametrize("call", ["write_back", "load_back"])
def test_a_copy_that_finds_no_memory_is_a_miss(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """It is told when what was queued of it has ended, and the next one goes well."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(bench.copies, "_gather" if call == "write_back" else "_scatter", fail)
        getattr(bench.copies, call)(moves(1))
    assert bench.done == {}
    bench.copies.poll()
    assert bench.done == {1: 0, 2: 0, 3: 0}
    assert "out of memory" in caplog.text
    getattr(bench.copies, call)(moves(4))
    bench.copies.poll()
    assert [bench.done[number] for number in (4, 5, 6)] == [11, 11, 11]


def test_what_it_takes_of_the_device_is_known_before(bench: Bench) -> None:
    takes = bench.copies._staging.nbytes + bench.copies._gathered.nbytes
    assert takes == staging_bytes(GROUPS, 4, 4)


def test_large_states_share_the_buffer_fewer_at_a_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice that would not fit holds fewer layers, and at least one; nothing else changes."""
    monkeypatch.setattr(stream_copies, "_STAGING", 3 * 200)
    copies = StreamCopies(bench.host, bench.done.__setitem__, device=torch.device("cpu"))
    assert [(each.chunk, len(each.parts)) for each in copies._slices[:3]] == [(1, LAYERS - 1), (1, 1), (4, 1)]
    assert copies._staging.nbytes + copies._gathered.nbytes == staging_bytes(GROUPS, 4, 4)
    copies.write_back(moves(1))
    for tensor in bench.pool.tensors:
        tensor[1:PAGES] = 0
    copies.load_back(moves(4))
    for tensor, before in zip(bench.pool.tensors, bench.before, strict=True):
        torch.testing.assert_close(tensor, before, rtol=0, atol=0)


def test_states_are_queued_before_layers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward waits for them before it begins."""
    order: list[int] = []
    scatter = bench.copies._scatter

    def note(group: int, *rest: Any) -> None:
        order.append(group)
        scatter(group, *rest)

    monkeypatch.setattr(bench.copies, "_scatter", note)
    bench.copies.load_back(moves())
    assert order == [2, 0, 1, 0, 0]
    assert bench.copies._reached[LAYERS] is not bench.copies._reached[0]

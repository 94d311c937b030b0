"""Tiers without a scheduler: plans made by hand move pages between device, host and store."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tokenspeed.builtin.memory_store import MemoryStore
from tokenspeed.interfaces.kvstore import KVNamespace, KVStoreContext
from tokenspeed.runtime.cache_executor import CacheExecutor
from tokenspeed.runtime.cache_ops import FIELDS, CacheOps, runs
from tokenspeed.runtime.host_pool import HostPool, host_pages
from tokenspeed.runtime.kv_pool import KVPool
from tokenspeed.runtime.page_copies import PageCopies, PageMove, ThreadCopies
from tokenspeed.runtime.store_guard import StoreGuard
from tokenspeed.testing.harness import kernel_registry
from tokenspeed.types import CacheGroup, KVLayout

GROUPS = (
    CacheGroup(kind="full", layers=(0, 2), kv_heads=2, head_dim=4, v_head_dim=3),
    CacheGroup(kind="window", layers=(1,), kv_heads=1, head_dim=8, v_head_dim=8, window=9),
)
#: Full groups in lockstep around the others, and states of several tensors and types.
MIXED = (
    CacheGroup(kind="full", layers=(4, 0), kv_heads=2, head_dim=4, v_head_dim=3),
    CacheGroup(kind="window", layers=(1,), kv_heads=1, head_dim=8, v_head_dim=8, window=9),
    CacheGroup(
        kind="recurrent",
        layers=(2, 5),
        states=((3, 5), (7,), ()),
        state_dtypes=("float32", "bfloat16", "float16"),
        interval=8,
    ),
    CacheGroup(kind="mla", layers=(3,), kv_heads=1, head_dim=6, v_head_dim=4),
)
DEVICE_PAGES, HOST_PAGES = 6, 8
#: How long anything may take on a machine that is busy with other things.
PATIENCE_S = 60.0
WAITING = threading.Condition.wait.__code__


def make_pool(
    layout: KVLayout = KVLayout.NHD, dtype: torch.dtype = torch.float32, groups: Sequence[CacheGroup] = GROUPS
) -> KVPool:
    pool = KVPool(
        groups,
        select_kernel=kernel_registry().select,
        layout=layout,
        page_sizes=[0 if group.kind == "recurrent" else 4 for group in groups],
        num_pages=[DEVICE_PAGES] * len(groups),
        dtype=dtype,
        device=torch.device("cpu"),
    )
    torch.manual_seed(0)
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    return pool


def ops(**pages: list[tuple[int, ...]]) -> CacheOps:
    """Operations by kind: entries (number, group, ...) in the order of the kind's arrays; a hash is made of a small number."""
    plan: dict[str, Any] = {name: np.zeros(0, dtype=np.int64 if name.endswith("_op") else np.int32) for name in FIELDS}
    plan |= {name: np.zeros((0, 16), dtype=np.uint8) for name in FIELDS if name.endswith("_hash")}
    for kind, entries in pages.items():
        for column, name in enumerate(name for name in FIELDS if name.startswith(kind)):
            values = [entry[column] for entry in entries]
            if name.endswith("_hash"):
                plan[name] = np.array([[value] * 16 for value in values], dtype=np.uint8)
            else:
                plan[name] = np.array(values, dtype=plan[name].dtype)
    made = CacheOps.of(SimpleNamespace(**plan))
    assert made is not None
    return made


class Bench:
    def __init__(self, pool: KVPool, copies: Callable[..., PageCopies] | None = None) -> None:
        self.pool = pool
        self.host = HostPool(pool, [HOST_PAGES] * len(pool.groups), pinned=False)
        self.shared: dict[str, Any] = {}
        spaces = [
            KVNamespace(model="m", dtype="float32", layout="NHD", page_size=4, page_bytes=size, group=index)
            for index, size in enumerate(self.host.page_bytes)
        ]
        store = StoreGuard(self.make, spaces, timeout_s=PATIENCE_S)
        self.executor = CacheExecutor(
            self.host, device=torch.device("cpu"), store=store, timeout_s=PATIENCE_S, copies=copies
        )
        pool.use_transfers(self.executor.wait_layer)

    def make(self, staging: npt.NDArray[np.uint8]) -> MemoryStore:
        return MemoryStore(KVStoreContext(staging=staging, timeout_s=PATIENCE_S, shared=self.shared))

    def run(self, operations: CacheOps) -> dict[int, int]:
        """Begin, and wait for every answer."""
        self.executor.begin(operations)
        answers: dict[int, int] = {}
        end = time.monotonic() + PATIENCE_S
        while self.executor.in_flight:
            assert time.monotonic() < end
            answers.update(self.executor.finished())
        return answers


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(make_pool())
    yield made
    made.executor.close()


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_that_went_to_the_host_comes_back_in_every_layer(layout: KVLayout, dtype: torch.dtype) -> None:
    bench = Bench(make_pool(layout, dtype))
    before = [tensor.clone() for tensor in bench.pool.tensors]
    out = ops(write_back=[(1, 0, 2, 7), (1, 0, 3, 0), (2, 1, 5, 4)])
    assert bench.run(out) == {1: 2, 2: 1}
    for tensor in bench.pool.tensors:
        tensor.zero_()
    back = ops(load_back=[(3, 0, 7, 2, 0), (3, 0, 0, 3, 0), (4, 1, 4, 5, -1)])
    assert bench.run(back) == {3: 2, 4: 1}
    for tensor, old in zip(bench.pool.tensors, before, strict=True):
        group = 1 if tensor is bench.pool.layer(1).k or tensor is bench.pool.layer(1).v else 0
        pages = [2, 3] if group == 0 else [5]
        assert torch.equal(tensor[pages], old[pages])
        others = [page for page in range(DEVICE_PAGES) if page not in pages]
        assert not tensor[others].any()
    bench.executor.close()


def named_by(pool: KVPool, group: int) -> list[torch.Tensor]:
    """The tensors whose first axis a page of ``group`` names, by the declarations."""
    kinds = ("full", "mla") if group == 0 else (pool.groups[group].kind,)
    layers = sorted(layer for each in pool.groups if each.kind in kinds for layer in each.layers)
    found = [pool.states(i) if pool.groups[group].kind == "recurrent" else pool.layer(i) for i in layers]
    return [tensor for each in found for tensor in (each if isinstance(each, tuple) else (each.k, each.v))]


def test_a_page_holds_all_that_its_group_has_and_groups_do_not_meet() -> None:
    """Two full groups and a latent one share a page id; windows and states have numbers of their own, though equal ones."""
    bench = Bench(make_pool(groups=MIXED))
    before = [[tensor.clone() for tensor in named_by(bench.pool, group)] for group in range(3)]
    assert bench.run(ops(write_back=[(1, 0, 2, 7), (2, 1, 2, 7), (3, 2, 2, 7), (3, 2, 5, 0)])) == {1: 1, 2: 1, 3: 2}
    for tensor in bench.pool.tensors:
        tensor.zero_()
    for group, moved in ((2, {5: 2, 2: 5}), (0, {1: 2}), (1, {0: 2})):
        back = ops(load_back=[(9 - group, group, 7 if old == 2 else 0, new, 0) for new, old in moved.items()])
        assert bench.run(back) == {9 - group: len(moved)}
        for tensor, old in zip(named_by(bench.pool, group), before[group], strict=True):
            for page in range(len(tensor)):
                assert torch.equal(tensor[page], old[moved[page]] if page in moved else torch.zeros_like(old[0]))
        for other in range(3):
            if other not in (2, 0, 1)[: (2, 0, 1).index(group) + 1]:
                assert not any(tensor.any() for tensor in named_by(bench.pool, other))
    assert (dict(bench.executor.stats.out), dict(bench.executor.stats.back)) == ({0: 1, 1: 1, 2: 2}, {0: 1, 1: 1, 2: 2})
    bench.executor.close()


def test_a_host_page_takes_the_bytes_that_its_groups_declare() -> None:
    pool = make_pool(groups=MIXED, dtype=torch.bfloat16)
    host = HostPool(pool, [HOST_PAGES] * 4, pinned=False)
    full = 4 * (MIXED[0].bytes_per_token(2) + MIXED[3].bytes_per_token(2))
    assert host.page_bytes == [full, 4 * MIXED[1].bytes_per_token(2), MIXED[2].bytes_per_state(2), 0]
    assert MIXED[2].bytes_per_state(2) == 2 * (15 * 4 + 7 * 2 + 2)
    assert [[part.layer for part in parts] for parts in host.parts] == [[0, 3, 4], [1], [2, 5], []]
    assert host.nbytes == HOST_PAGES * sum(host.page_bytes)


def test_groups_have_names_of_their_own_in_the_store() -> None:
    """A state, a window's page and a full page of one block have the same hash."""
    bench = Bench(make_pool(groups=MIXED))
    before = [[tensor.clone() for tensor in named_by(bench.pool, group)] for group in range(3)]
    bench.run(ops(write_back=[(1, 0, 1, 1), (2, 1, 2, 1), (3, 2, 3, 1)]))
    assert bench.run(ops(store=[(4, 2, 1, 10)])) == {4: 1}
    assert bench.run(ops(lookup=[(5, 0, 10), (6, 1, 10), (7, 2, 10)])) == {5: 0, 6: 0, 7: 1}
    bench.run(ops(store=[(8, 0, 1, 10), (9, 1, 1, 10)]))
    assert bench.run(ops(prefetch=[(10, 0, 4, 10), (11, 1, 4, 10), (12, 2, 4, 10)])) == {10: 1, 11: 1, 12: 1}
    for tensor in bench.pool.tensors:
        tensor.zero_()
    bench.run(ops(load_back=[(13, 0, 4, 0, 0), (14, 1, 4, 0, 0), (15, 2, 4, 0, 0)]))
    for group, page in ((0, 1), (1, 2), (2, 3)):
        for tensor, old in zip(named_by(bench.pool, group), before[group], strict=True):
            assert torch.equal(tensor[0], old[page])
    bench.executor.close()


def test_a_full_group_without_layers_has_pages_of_no_bytes_in_every_tier() -> None:
    groups = (CacheGroup(kind="full", layers=()), MIXED[1])
    bench = Bench(make_pool(groups=groups))
    assert bench.host.page_bytes[0] == 0
    assert bench.run(ops(write_back=[(1, 0, 0, 0), (1, 0, 1, 1)])) == {1: 2}
    assert bench.run(ops(store=[(2, 0, 0, 10), (2, 0, 1, 11)])) == {2: 2}
    assert bench.run(ops(lookup=[(3, 0, 10), (3, 0, 11), (3, 0, 12)])) == {3: 2}
    assert bench.run(ops(prefetch=[(4, 0, 2, 10), (4, 0, 3, 12)])) == {4: 1}
    assert bench.run(ops(load_back=[(5, 0, 2, 3, 0)])) == {5: 1}
    bench.executor.close()


def test_pages_travel_to_the_store_and_back(bench: Bench) -> None:
    before = bench.pool.layer(0).k.clone()
    bench.run(ops(write_back=[(1, 0, 0, 0), (1, 0, 1, 1)]))
    assert bench.run(ops(store=[(2, 0, 0, 10), (2, 0, 1, 11)])) == {2: 2}
    assert bench.run(ops(lookup=[(3, 0, 10), (3, 0, 11), (3, 0, 12), (4, 1, 10)])) == {3: 2, 4: 0}
    assert bench.run(ops(prefetch=[(5, 0, 4, 10), (5, 0, 5, 11), (5, 0, 6, 12)])) == {5: 2}
    bench.run(ops(load_back=[(6, 0, 4, 2, 0), (6, 0, 5, 3, 0)]))
    assert torch.equal(bench.pool.layer(0).k[2:4], before[0:2])


def until_it_waits(running: threading.Thread) -> None:
    """Return once ``running`` stands in a wait that only an event ends. Fails where it ends, or waits for nothing within ``PATIENCE_S``."""
    end = time.monotonic() + PATIENCE_S
    while (frame := sys._current_frames().get(running.ident or 0)) is None or frame.f_code is not WAITING:
        assert running.is_alive(), "nothing held it up"
        assert time.monotonic() < end
        time.sleep(0.001)


class Held(ThreadCopies):
    """Copies that wait for ``gate`` before each layer."""

    gate: threading.Event

    def _load_part(self, move: PageMove, index: int) -> None:
        assert self.gate.wait(PATIENCE_S)
        super()._load_part(move, index)


def test_a_layer_waits_for_its_own_copy(bench: Bench) -> None:
    gate = threading.Event()
    Held.gate = gate
    held = Bench(bench.pool, copies=Held)
    held.executor.begin(ops(load_back=[(1, 0, 0, 0, 0)]))
    reached: list[int] = []

    def forward() -> None:
        for layer in (1, 0, 2):  # layer 1 is of a group that loads nothing
            held.pool.wait_layer(layer)
            reached.append(layer)

    running = threading.Thread(target=forward)
    running.start()
    until_it_waits(running)
    assert reached == [1]
    gate.set()
    running.join(PATIENCE_S)
    assert reached == [1, 0, 2]
    assert held.executor.wait([1]) == {1: 1}
    assert held.executor.finished() == [(1, 1)]
    held.executor.close()


def test_states_come_before_layers_and_are_waited_for_before_they_are_copied() -> None:
    """The forward needs a state when it begins, and a layer's pages when it comes to it."""
    order: list[tuple[int, int]] = []

    class Noted(ThreadCopies):
        def _load_part(self, move: PageMove, index: int) -> None:
            order.append((move.group, self._host.parts[move.group][index].layer))
            super()._load_part(move, index)

    bench = Bench(make_pool(groups=MIXED), copies=Noted)
    bench.run(ops(load_back=[(1, 0, 0, 0, 0), (2, 1, 0, 0, 0), (3, 2, 0, 0, 0)]))
    assert order == [(2, 2), (2, 5), (0, 0), (1, 1), (0, 3), (0, 4)]
    bench.executor.close()


def test_a_step_waits_for_states_and_not_for_layers() -> None:
    states, layers = threading.Event(), threading.Event()

    class Gated(ThreadCopies):
        def _load_part(self, move: PageMove, index: int) -> None:
            assert (states if move.group == 2 else layers).wait(PATIENCE_S)
            super()._load_part(move, index)

    bench = Bench(make_pool(groups=MIXED), copies=Gated)
    saved = bench.pool.states(5)[0][4].clone()
    bench.run(ops(write_back=[(1, 2, 4, 0)]))
    bench.executor.begin(ops(load_back=[(2, 0, 0, 0, 0), (3, 2, 0, 1, 0)]))
    copied: list[torch.Tensor] = []

    def step() -> None:
        bench.executor.wait_states()
        bench.pool.prepare_states(*(np.array([value], dtype=np.int32) for value in (1, 2, 1, 3)))
        copied.append(bench.pool.states(5)[0][3].clone())

    running = threading.Thread(target=step)
    running.start()
    until_it_waits(running)
    assert copied == []
    states.set()
    running.join(PATIENCE_S)
    assert not running.is_alive()
    assert torch.equal(copied[0], saved)
    layers.set()
    assert bench.executor.wait([2, 3]) == {2: 1, 3: 1}
    bench.executor.close()


def test_a_layer_of_two_groups_is_there_when_both_have_come() -> None:
    """A layer may have attention and a state side by side."""
    layers = threading.Event()

    class Gated(ThreadCopies):
        def _load_part(self, move: PageMove, index: int) -> None:
            assert move.group == 1 or layers.wait(PATIENCE_S)
            super()._load_part(move, index)

    both = (GROUPS[0], CacheGroup(kind="recurrent", layers=(0,), states=((2,),), interval=4))
    bench = Bench(make_pool(groups=both), copies=Gated)
    bench.executor.begin(ops(load_back=[(1, 0, 0, 0, 0), (2, 1, 0, 1, 0)]))
    reached: list[int] = []
    running = threading.Thread(target=lambda: (bench.pool.wait_layer(0), reached.append(0)))
    running.start()
    until_it_waits(running)
    assert reached == []
    layers.set()
    running.join(PATIENCE_S)
    assert reached == [0]
    assert bench.executor.wait([1, 2]) == {1: 1, 2: 1}
    bench.executor.close()


class Failing(ThreadCopies):
    def _load_part(self, move: PageMove, index: int) -> None:
        if index == 1:
            raise MemoryError("lost")
        super()._load_part(move, index)

    def _write_pages(self, move: PageMove) -> None:
        raise MemoryError("lost")


def test_a_copy_that_fails_is_told_as_failed_and_holds_up_nobody(bench: Bench) -> None:
    failing = Bench(bench.pool, copies=Failing)
    assert failing.run(ops(write_back=[(1, 0, 0, 0)])) == {1: 0}
    failing.executor.begin(ops(load_back=[(2, 0, 0, 0, 0), (2, 0, 1, 1, 0)]))
    for layer in range(3):
        failing.pool.wait_layer(layer)
    assert failing.executor.wait([2]) == {2: 0}
    assert failing.executor.finished() == [(2, 0)]
    assert failing.executor.stats.failed == 3
    failing.executor.close()


def test_a_store_that_answers_again_is_used_again_though_nobody_asked(bench: Bench) -> None:
    """An idle engine's first request after an outage must not be the one that finds the store bypassed."""
    real, broken = MemoryStore.exists, threading.Event()

    def exists(self: MemoryStore, namespace: KVNamespace, keys: Any, timeout_s: float) -> list[bool]:
        if broken.is_set():
            raise OSError("away")
        return real(self, namespace, keys, timeout_s)

    store = bench.executor.store
    assert store is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryStore, "exists", exists)
        broken.set()
        assert bench.run(ops(lookup=[(1, 0, 10)])) == {1: 0}
        assert not store.lanes[0].up
        broken.clear()
        end = time.monotonic() + PATIENCE_S
        while not store.lanes[0].up and time.monotonic() < end:
            time.sleep(0.01)
        assert store.lanes[0].up


def test_more_store_operations_than_may_wait_are_failed_at_once(bench: Bench) -> None:
    """A slow store must not hold the pages of the host tier."""
    hold = threading.Event()
    bench.executor._saves.post(hold.wait)  # type: ignore[union-attr, arg-type]
    bench.executor.begin(ops(store=[(number, 0, 0, 1) for number in range(1, 101)]))
    answers = dict(bench.executor.finished())
    assert len(answers) >= 30
    assert not any(answers.values())
    assert bench.executor.stats.refused == len(answers)
    hold.set()


def test_without_a_store_its_operations_fail() -> None:
    pool = make_pool()
    executor = CacheExecutor(HostPool(pool, [2, 2], pinned=False), device=torch.device("cpu"))
    executor.begin(ops(lookup=[(1, 0, 1)], store=[(2, 0, 0, 1)]))
    assert executor.finished() == [(1, 0), (2, 0)]
    executor.close()


def test_runs_of_one_number_are_one_operation() -> None:
    cut = list(runs(np.array([4, 4, 5, 9, 9, 9]), np.array([0, 0, 1, 0, 0, 0], dtype=np.int32)))
    assert [(run.number, run.group, run.pages) for run in cut] == [(4, 0, 2), (5, 1, 1), (9, 0, 3)]
    assert list(runs(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))) == []


def test_a_plan_without_operations_has_none() -> None:
    plan = {name: np.zeros(0, dtype=np.int32) for name in FIELDS}
    assert CacheOps.of(SimpleNamespace(**plan)) is None


@pytest.mark.parametrize(
    ("ratio", "size", "expected"),
    [(0.0, None, [0, 0, 0]), (2.5, None, [250, 25, 250]), (1.0, 5500, [50, 5, 50]), (1.0, 11_000, [100, 10, 100])],
)
def test_the_host_tier_is_sized_by_ratio_or_by_bytes(ratio: float, size: int | None, expected: list[int]) -> None:
    """The last group's pages, a full one in lockstep or one without layers, are of no bytes."""
    pages = host_pages([100, 100, 0], [100, 10, 100], ratio=ratio, size=size)
    assert pages == expected
    if size is not None:
        assert 100 * (pages[0] + pages[1]) <= size

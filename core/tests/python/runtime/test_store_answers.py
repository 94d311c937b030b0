"""A store that answers with anything but what its interface says is treated as one that fails, and its conformance suite refuses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from tokenspeed.builtin.memory_store import MemoryStore
from tokenspeed.interfaces.kvstore import Frame, KVNamespace, KVStore, KVStoreContext
from tokenspeed.plugins.specs import KVStoreSpec
from tokenspeed.runtime import store_lane
from tokenspeed.runtime.store_guard import StoreGuard
from tokenspeed.runtime.store_lane import StoreLane
from tokenspeed.testing.kv_store import KVStoreSuite
from tokenspeed.testing.kv_store_bench import StoreBench

SPACE = KVNamespace(model="m", dtype="float32", layout="NHD", page_size=4, page_bytes=256)
KEYS = [bytes([i]) * 16 for i in range(1, 9)]
PAGES = list(np.random.default_rng(0).integers(0, 256, (8, SPACE.page_bytes), dtype=np.uint8))
TIMEOUT_S = 60.0

T = TypeVar("T")
Answer = Callable[[Any], Any]


class Lying(MemoryStore):
    """Answers properly, and tells what ``lies`` makes of it, by the call's name."""

    lies: Mapping[str, Answer]

    def _tell(self, call: str, answer: T) -> T:
        told: T = self.lies.get(call, lambda proper: proper)(answer)
        return told

    @property
    def counters(self) -> dict[str, int]:
        return self._tell("counters", super().counters)

    def exists(self, namespace: KVNamespace, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        return self._tell("exists", super().exists(namespace, keys, timeout_s))

    def get_into(
        self, namespace: KVNamespace, keys: Sequence[bytes], frames: Sequence[Frame], timeout_s: float
    ) -> list[bool]:
        return self._tell("get_into", super().get_into(namespace, keys, frames, timeout_s))

    def put(
        self, namespace: KVNamespace, keys: Sequence[bytes], frames: Sequence[Frame], timeout_s: float
    ) -> list[bool]:
        return self._tell("put", super().put(namespace, keys, frames, timeout_s))

    def delete(self, namespace: KVNamespace, timeout_s: float) -> int:
        return self._tell("delete", super().delete(namespace, timeout_s))


def maker(lies: Mapping[str, Answer], shared: dict[str, Any]) -> Callable[[npt.NDArray[np.uint8]], KVStore]:
    def make(staging: npt.NDArray[np.uint8]) -> KVStore:
        store = Lying(KVStoreContext(staging=staging, timeout_s=TIMEOUT_S, shared=shared))
        store.lies = lies
        return store

    return make


@pytest.fixture
def lies() -> dict[str, Answer]:
    return {}


@pytest.fixture
def guard(lies: dict[str, Answer]) -> Iterator[StoreGuard]:
    """Around a store that has the first four pages."""
    made = StoreGuard(maker(lies, {}), [SPACE], timeout_s=TIMEOUT_S, patience_s=TIMEOUT_S)
    assert made.save(0, KEYS[:4], PAGES[:4], soon()) == 4
    yield made
    lies.clear()
    made.close()


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


def recover(lane: StoreLane) -> None:
    """Let a probe be due, and wait until the lane is up."""
    lane._probe_at_s = 0.0
    end = soon()
    while lane.attend() is not None:
        assert time.monotonic() < end
        time.sleep(0.005)


def load(guard: StoreGuard, count: int = 4) -> int:
    return guard.load(0, KEYS[:count], [np.zeros(SPACE.page_bytes, dtype=np.uint8) for _ in range(count)], soon())


#: What is done, the call of the store behind it, its lane, and what it gives where the store answers properly.
OPERATIONS: dict[str, tuple[str, int, Callable[[StoreGuard], int], int]] = {
    "count": ("exists", 0, lambda guard: guard.count(0, KEYS[:4], soon()), 4),
    "load": ("get_into", 0, load, 4),
    "look before a save": ("exists", 1, lambda guard: guard.save(0, KEYS[:4], PAGES[:4], soon()), 4),
    "save": ("put", 1, lambda guard: guard.save(0, KEYS[4:], PAGES[4:], soon()), 4),
    "delete": ("delete", 1, lambda guard: guard.delete(0, soon()), True),
}
FLAGS: dict[str, Answer] = {
    "None": lambda _: None,
    "one bool": lambda _: True,
    "a number": lambda _: 4,
    "too short": lambda proper: proper[:-1],
    "too long": lambda proper: [*proper, True],
    "empty": lambda _: [],
    "strings": lambda proper: ["yes" for _ in proper],
    "statuses": lambda proper: [int(ok) for ok in proper],
    "None among them": lambda proper: [*proper[:-1], None],
    "a text as long": lambda proper: "1" * len(proper),
    "bytes as long": lambda proper: bytes(len(proper)),
    "a dictionary": lambda proper: dict(enumerate(proper)),
    "an iterator": iter,
    "an array": np.array,
}
NUMBERS: dict[str, Answer] = {
    "None": lambda _: None,
    "a text": str,
    "a list": lambda _: [4],
    "below 0": lambda _: -1,
    "a bool": bool,
    "a fraction": float,
}
WRONG = [
    pytest.param(operation, answer, id=f"{operation}: {name}")
    for operation, (call, *_) in OPERATIONS.items()
    for name, answer in (NUMBERS if call == "delete" else FLAGS).items()
]


@pytest.mark.parametrize(("operation", "answer"), WRONG)
def test_a_wrong_answer_is_a_miss_an_error_and_a_bypass_until_the_store_answers_properly(
    guard: StoreGuard, lies: dict[str, Answer], monkeypatch: pytest.MonkeyPatch, operation: str, answer: Answer
) -> None:
    """And the other lane goes on; a probe that is answered wrong leaves the store down."""
    monkeypatch.setattr(store_lane, "_FIRST_PAUSE_S", 600.0)
    call, at, ask, proper = OPERATIONS[operation]
    lane, other = guard.lanes[at], guard.lanes[1 - at]
    lane._pause_s = 600.0  # no probe before the test wants one
    lies[call] = answer
    assert ask(guard) == 0
    assert (lane.up, lane.stats.failures, lane.stats.timeouts) == (False, 1, 0)
    assert (other.up, other.stats.failures) == (True, 0)
    assert ask(guard) == 0
    assert (lane.stats.failures, lane.stats.bypassed) == (1, 1)
    assert guard.counters.lost == guard.counters.bad == 0  # nothing is held against the pages
    lies.clear()
    recover(lane)
    assert ask(guard) == proper


@pytest.mark.parametrize("answer", [pytest.param(answer, id=name) for name, answer in FLAGS.items()])
def test_a_probe_with_a_wrong_answer_does_not_bring_the_store_back(
    guard: StoreGuard, lies: dict[str, Answer], answer: Answer
) -> None:
    lane = guard.lanes[0]
    lies["exists"] = answer
    assert guard.count(0, KEYS[:4], soon()) == 0
    end = soon()
    while lane.stats.failures < 2:  # the call, and a probe
        lane._probe_at_s = min(lane._probe_at_s, time.monotonic())
        lane.attend()
        assert time.monotonic() < end
        time.sleep(0.005)
    assert not lane.up


def test_an_engine_starts_without_a_store_that_answers_wrong(lies: dict[str, Answer]) -> None:
    lies["exists"] = lambda _: None
    guard = StoreGuard(maker(lies, {}), [SPACE], timeout_s=TIMEOUT_S)
    guard.open()
    assert [lane.up for lane in guard.lanes] == [False, False]
    guard.close()


@pytest.mark.parametrize("answer", [tuple, lambda proper: [np.bool_(ok) for ok in proper]], ids=["a tuple", "numpy's"])
def test_what_can_only_mean_one_thing_is_taken(guard: StoreGuard, lies: dict[str, Answer], answer: Answer) -> None:
    lies.update(exists=answer, get_into=answer, put=answer)
    assert load(guard) == 4
    assert guard.save(0, KEYS, PAGES, soon()) == 8


@pytest.mark.parametrize("counts", [None, 3, {"evicted": None}, {"evicted": "many"}, {"evicted": 1 << 70}], ids=str)
def test_counters_of_another_form_are_not_read_and_cost_nothing(
    guard: StoreGuard, lies: dict[str, Answer], counts: object
) -> None:
    """Figures travel to the server in 64 bits."""
    lies["counters"] = lambda _: counts
    assert load(guard) == 4
    assert guard.lanes[0].up
    assert guard.lanes[0].counters == {}


class Unspeakable(BaseException):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("call", ["exists", "counters"])
def test_errors_that_are_no_exceptions_and_have_no_text_end_no_thread(
    guard: StoreGuard, lies: dict[str, Answer], call: str
) -> None:
    def fail(_: object) -> None:
        raise Unspeakable

    lies[call] = fail
    assert guard.count(0, KEYS[:4], soon()) == (4 if call == "counters" else 0)
    lane = guard.lanes[0]
    assert (lane.up, lane.stats.timeouts) == (call == "counters", 0)
    lies.clear()
    recover(lane)
    assert guard.count(0, KEYS[:4], soon()) == 4


class LyingBench(StoreBench):
    def __init__(self, lies: Mapping[str, Answer]) -> None:
        super().__init__(KVStoreSpec(name="lying", target="unused:unused"), {}, 1000, TIMEOUT_S)
        self._lies = lies

    def make(self, staging: npt.NDArray[np.uint8]) -> KVStore:
        return maker(self._lies, self._shared)(staging)


ANSWERS = KVStoreSuite().test_answers_are_lists_of_bool_and_counts_are_int


@pytest.mark.parametrize(("operation", "answer"), [one for one in WRONG if one.values[0] != "look before a save"])
def test_the_suite_refuses_a_store_that_answers_wrong(operation: str, answer: Answer) -> None:
    ANSWERS(LyingBench({}), 2)
    with pytest.raises(AssertionError):
        ANSWERS(LyingBench({OPERATIONS[operation][0]: answer}), 2)

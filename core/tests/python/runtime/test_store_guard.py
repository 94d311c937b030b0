"""The guard around an L3 store: what a store does wrong costs a deadline at most, and never a wrong page."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tokenspeed.builtin.memory_store import MemoryStore
from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kvstore import Frame, KVNamespace, KVStore, KVStoreContext
from tokenspeed.runtime.kv_frames import HEADER_BYTES, frame_bytes, seal, unseal
from tokenspeed.runtime.store_guard import StoreGuard

SPACE = KVNamespace(model="m", dtype="float32", layout="NHD", page_size=4, page_bytes=256)
KEYS = [bytes([i]) * 16 for i in range(1, 9)]
TIMEOUT_S = 0.2


def pages(count: int, seed: int = 0) -> list[npt.NDArray[np.uint8]]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, SPACE.page_bytes), dtype=np.uint8))


class Scripted(MemoryStore):
    """Does what ``script`` says before each call: a callable by the call's name."""

    script: dict[str, Any]

    @property
    def counters(self) -> dict[str, int]:
        self.script.get("counters", lambda: None)()
        return super().counters

    def exists(self, namespace: KVNamespace, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        self.script.get("exists", lambda: None)()
        return super().exists(namespace, keys, timeout_s)

    def get_into(
        self, namespace: KVNamespace, keys: Sequence[bytes], frames: Sequence[Frame], timeout_s: float
    ) -> list[bool]:
        self.script.get("get", lambda: None)()
        answer = super().get_into(namespace, keys, frames, timeout_s)
        self.script.get("got", lambda _: None)(frames)
        return answer

    def put(
        self, namespace: KVNamespace, keys: Sequence[bytes], frames: Sequence[Frame], timeout_s: float
    ) -> list[bool]:
        self.script.get("put", lambda: None)()
        return super().put(namespace, keys, frames, timeout_s)


class Bench:
    """A guard around a scripted store."""

    def __init__(self) -> None:
        self.script: dict[str, Any] = {}
        self.shared: dict[str, Any] = {}
        self.made = 0
        self.guard = StoreGuard(self.make, [SPACE], timeout_s=TIMEOUT_S, patience_s=TIMEOUT_S)

    def make(self, staging: npt.NDArray[np.uint8]) -> KVStore:
        self.made += 1
        self.script.get("make", lambda: None)()
        store = Scripted(KVStoreContext(staging=staging, timeout_s=TIMEOUT_S, shared=self.shared))
        store.script = self.script
        return store

    def load(self, count: int) -> tuple[int, list[npt.NDArray[np.uint8]]]:
        into = [np.zeros(SPACE.page_bytes, dtype=np.uint8) for _ in range(count)]
        return self.guard.load(0, KEYS[:count], into, time.monotonic() + 5), into

    def save(self, count: int) -> int:
        return self.guard.save(0, KEYS[:count], pages(count), time.monotonic() + 5)

    def count(self, count: int) -> int:
        return self.guard.count(0, KEYS[:count], time.monotonic() + 5)

    def until_up(self, lane: int = 0) -> bool:
        """Ask until the lane takes calls again; False after five seconds."""
        end = time.monotonic() + 5
        while time.monotonic() < end:
            if lane:
                self.save(1)
            else:
                self.count(1)
            if self.guard.lanes[lane].up:
                return True
            time.sleep(0.02)
        return False


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.script.clear()
    made.guard.close()


def raising(error: BaseException) -> Any:
    def throw() -> None:
        raise error

    return throw


def test_pages_come_back_as_they_went(bench: Bench) -> None:
    assert bench.save(5) == 5
    assert bench.count(8) == 5
    loaded, into = bench.load(8)
    assert loaded == 5
    np.testing.assert_array_equal(into[:5], pages(5))
    assert (bench.guard.counters.saved, bench.guard.counters.loaded) == (5, 5)


def test_what_is_there_is_not_sent_again(bench: Bench) -> None:
    assert bench.save(2) == 2
    assert bench.save(4) == 4
    assert bench.guard.counters.saved == 4


@pytest.mark.parametrize("offset", [0, 20, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 255])
def test_a_frame_with_one_byte_changed_is_not_taken(offset: int) -> None:
    frame = np.zeros(frame_bytes(SPACE.page_bytes), dtype=np.uint8)
    seal(frame, SPACE, KEYS[0], pages(1)[0])
    assert unseal(frame, SPACE, KEYS[0]) is not None
    frame[offset] ^= 1
    assert unseal(frame, SPACE, KEYS[0]) is None


def test_a_frame_of_another_key_namespace_or_length_is_not_taken() -> None:
    frame = np.zeros(frame_bytes(SPACE.page_bytes), dtype=np.uint8)
    seal(frame, SPACE, KEYS[0], pages(1)[0])
    other = KVNamespace(model="other", dtype="float32", layout="NHD", page_size=4, page_bytes=256)
    assert unseal(frame, SPACE, KEYS[1]) is None
    assert unseal(frame, other, KEYS[0]) is None
    assert unseal(frame[:-1], SPACE, KEYS[0]) is None
    assert unseal(frame[:10], SPACE, KEYS[0]) is None


def test_kv_18_pages_up_to_the_first_bad_one_are_taken_and_the_bad_one_is_not_asked_for_again(bench: Bench) -> None:
    """The store says that a page is there and gives something else."""
    bench.save(4)
    bench.script["got"] = lambda frames: frames[2].__setitem__(100, frames[2][100] ^ 1)
    loaded, into = bench.load(4)
    assert loaded == 2
    np.testing.assert_array_equal(into[:2], pages(2))
    assert bench.guard.counters.bad == 1
    assert bench.count(4) == 2
    bench.script.clear()
    assert bench.save(4) == 4  # computed again, it replaces the bad one
    assert bench.load(4)[0] == 4


@pytest.mark.parametrize("call", ["exists", "get", "make"])
def test_a_load_that_raises_is_a_miss_and_the_store_is_bypassed_until_it_answers(bench: Bench, call: str) -> None:
    if call != "make":
        bench.save(2)
    bench.script[call] = raising(OSError("gone"))
    assert (bench.load(2)[0] if call == "get" else bench.count(2)) == 0
    assert not bench.guard.lanes[0].up
    before = bench.guard.lanes[0].stats.calls
    assert bench.count(2) == 0
    assert (bench.guard.lanes[0].stats.calls, bench.guard.lanes[0].stats.bypassed) == (before, 1)
    bench.script.clear()
    assert bench.until_up()


def test_a_save_that_raises_does_not_stop_loads(bench: Bench) -> None:
    bench.save(2)
    bench.script["put"] = raising(OSError("full"))
    assert bench.save(4) == 2
    assert bench.load(2)[0] == 2
    bench.script.clear()
    assert bench.until_up(lane=1)
    assert bench.save(4) == 4


def test_a_store_that_hangs_costs_one_deadline(bench: Bench) -> None:
    bench.save(4)
    hang = threading.Event()
    bench.script["get"] = hang.wait
    began = time.monotonic()
    assert bench.load(4)[0] == 0
    assert TIMEOUT_S <= time.monotonic() - began < TIMEOUT_S + 1
    began = time.monotonic()
    for _ in range(20):
        assert bench.load(4)[0] == 0
    assert time.monotonic() - began < TIMEOUT_S
    bench.script.clear()
    assert bench.until_up()
    assert bench.load(4)[0] == 4
    hang.set()


def test_what_a_hanging_call_writes_later_reaches_no_page(bench: Bench) -> None:
    bench.save(1)
    hang, written = threading.Event(), threading.Event()
    bench.script["get"] = hang.wait
    bench.script["got"] = lambda _: written.set()
    loaded, into = bench.load(1)
    hang.set()
    assert written.wait(5)
    assert loaded == 0
    assert not into[0].any()


def test_a_save_that_was_given_up_while_it_waited_is_not_carried_out(bench: Bench) -> None:
    """Its pages belong to someone else by then, and the checksum would vouch for them."""
    release = threading.Event()
    bench.script["make"] = release.wait  # the store is still being made when the deadline passes
    assert bench.save(1) == 0
    release.set()
    bench.script.clear()
    assert bench.until_up()
    time.sleep(0.05)
    assert bench.count(1) == 0


def test_a_store_that_never_answers_leaves_a_few_threads_behind_and_no_more(bench: Bench) -> None:
    hang = threading.Event()
    bench.script["exists"] = hang.wait
    before = threading.active_count()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        bench.count(1)
        time.sleep(0.01)
    assert threading.active_count() - before <= 5
    hang.set()


def test_an_operation_past_its_deadline_asks_nothing(bench: Bench) -> None:
    past = time.monotonic() - 1
    assert bench.guard.count(0, KEYS, past) == 0
    assert bench.guard.load(0, KEYS[:1], [np.zeros(256, dtype=np.uint8)], past) == 0
    assert bench.guard.save(0, KEYS[:1], pages(1), past) == 0
    assert bench.made == 0


def test_what_a_user_must_change_ends_the_start(bench: Bench) -> None:
    bench.script["make"] = raising(ConfigError("--set file.directory: not writable"))
    with pytest.raises(ConfigError, match="not writable"):
        bench.guard.open()


def test_a_store_that_does_not_answer_at_start_is_tried_later(bench: Bench) -> None:
    bench.script["make"] = raising(ConnectionError("refused"))
    bench.guard.open()
    assert not bench.guard.lanes[0].up
    bench.script.clear()
    assert bench.until_up()


def test_a_wrong_answer_is_a_miss(bench: Bench) -> None:
    """A store that answers for fewer keys than it was asked for."""
    bench.save(2)
    guard = bench.guard

    class Short(Scripted):
        def exists(self, namespace: KVNamespace, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
            return [True]

    def make(staging: npt.NDArray[np.uint8]) -> KVStore:
        store = Short(KVStoreContext(staging=staging, timeout_s=TIMEOUT_S, shared=bench.shared))
        store.script = {}
        return store

    guard = StoreGuard(make, [SPACE], timeout_s=TIMEOUT_S)
    assert guard.count(0, KEYS[:2], time.monotonic() + 5) == 0
    guard.close()


def test_counters_are_read_on_the_stores_thread_and_what_they_raise_costs_nothing(bench: Bench) -> None:
    readers: list[threading.Thread] = []
    bench.script["counters"] = lambda: readers.append(threading.current_thread())
    assert bench.save(2) == 2
    assert bench.guard.lanes[1].counters == {}  # no count yet is no entry
    assert {thread.name for thread in readers} == {"kvstore saves"}
    bench.script["counters"] = raising(RuntimeError("counters"))
    assert bench.save(4) == 4
    assert bench.load(4)[0] == 4
    assert all(lane.up and lane.counters == {} for lane in bench.guard.lanes)


def test_counters_can_be_read_while_the_worker_is_given_up(bench: Bench) -> None:
    """Another thread reads figures all the while; the counts of objects that failed stay."""
    errors: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                for lane in bench.guard.lanes:
                    _ = lane.counters
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    lane = bench.guard.lanes[1]
    for _ in range(200):
        lane._post(lambda turn: None).done.wait(5)
        lane._part()
    stop.set()
    reader.join()
    assert errors == []


def test_an_eviction_is_counted_once(bench: Bench) -> None:
    """Objects share their frames, and each one counts what it evicted itself, also where another one takes its place."""
    proper = bench.make

    def small(staging: npt.NDArray[np.uint8]) -> KVStore:
        store = proper(staging)
        assert isinstance(store, MemoryStore)
        store._cap = 3 * frame_bytes(SPACE.page_bytes)
        return store

    guard = StoreGuard(small, [SPACE], timeout_s=TIMEOUT_S, patience_s=TIMEOUT_S)
    guard.open()
    assert guard.save(0, KEYS[:5], pages(5), time.monotonic() + 5) == 5  # two of them are gone again
    assert guard.count(0, KEYS[:5], time.monotonic() + 5) == 0
    for lane in guard.lanes:
        lane._part()
    assert sum(lane.counters.get("evicted", 0) for lane in guard.lanes) == 2
    guard.open()
    assert sum(lane.counters.get("evicted", 0) for lane in guard.lanes) == 2
    guard.close()


def test_deleting_a_namespace_removes_its_pages(bench: Bench) -> None:
    bench.save(3)
    assert bench.guard.delete(0, time.monotonic() + 5)
    assert bench.count(3) == 0

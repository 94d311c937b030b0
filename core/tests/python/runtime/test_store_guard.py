"""The guard around an L3 store: what a store does wrong costs a deadline at most, and never a wrong page."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tokenspeed.builtin.memory_store import MemoryStore
from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kvstore import Frame, KVNamespace, KVStore, KVStoreContext
from tokenspeed.runtime import store_guard, store_lane
from tokenspeed.runtime.kv_frames import HEADER_BYTES, frame_bytes, seal, unseal
from tokenspeed.runtime.store_guard import StoreGuard

SPACE = KVNamespace(model="m", dtype="float32", layout="NHD", page_size=4, page_bytes=256)
KEYS = [bytes([i]) * 16 for i in range(1, 9)]
#: A deadline that no call of a store that answers comes near to, also on a busy machine; and one for stores that hang.
TIMEOUT_S, HANG_S = 60.0, 0.2


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

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.script: dict[str, Any] = {}
        self.shared: dict[str, Any] = {}
        self.made = 0
        self.guard = StoreGuard(self.make, [SPACE], timeout_s=timeout_s, patience_s=timeout_s)

    def make(self, staging: npt.NDArray[np.uint8]) -> KVStore:
        self.made += 1
        self.script.get("make", lambda: None)()
        store = Scripted(KVStoreContext(staging=staging, timeout_s=TIMEOUT_S, shared=self.shared))
        store.script = self.script
        return store

    def load(self, count: int) -> tuple[int, list[npt.NDArray[np.uint8]]]:
        into = [np.zeros(SPACE.page_bytes, dtype=np.uint8) for _ in range(count)]
        return self.guard.load(0, KEYS[:count], into, time.monotonic() + TIMEOUT_S), into

    def save(self, count: int) -> int:
        return self.guard.save(0, KEYS[:count], pages(count), time.monotonic() + TIMEOUT_S)

    def count(self, count: int) -> int:
        return self.guard.count(0, KEYS[:count], time.monotonic() + TIMEOUT_S)

    def until_up(self, lane: int = 0) -> bool:
        """Ask until the lane takes calls again; False after a minute."""
        end = time.monotonic() + 60
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


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """One whose calls have a short deadline, and that asks again soon: each call that is to succeed is repeated until it does."""
    monkeypatch.setattr(store_lane, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(store_lane, "_LONGEST_PAUSE_S", 0.05)
    made = Bench(HANG_S)
    yield made
    made.script.clear()
    made.guard.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


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


def test_pauses_grow_while_probes_pass_and_calls_fail(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: each save fails and each probe passes. What has worked for a while is asked again soon."""
    clock = [1e6]
    monkeypatch.setattr(store_lane, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    lane = bench.guard.lanes[1]
    for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        bench.script["put"] = raising(OSError("full"))
        bench.save(4)
        assert not lane.up
        assert lane.attend() == pytest.approx(pause_s)
        clock[0] += pause_s
        until(lambda: lane.attend() is None)
        assert lane.up
    clock[0] += 31
    bench.save(4)
    assert lane.attend() == pytest.approx(0.5)


def test_a_store_that_hangs_costs_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_lane, "_FIRST_PAUSE_S", 600.0)  # no probe meanwhile
    bench = Bench(HANG_S)
    lane = bench.guard.lanes[0]
    answers = threading.Event()
    bench.script["get"] = lambda: answers.wait(60)
    began = time.monotonic()
    assert bench.load(4)[0] == 0
    assert HANG_S <= time.monotonic() - began < 30  # not what the store takes
    assert (lane.stats.calls, lane.stats.timeouts, lane.up) == (1, 1, False)
    for _ in range(20):
        assert bench.load(4)[0] == 0
    assert (lane.stats.calls, lane.stats.timeouts, lane.stats.bypassed) == (1, 1, 20)
    answers.set()
    bench.guard.close()


def test_a_store_that_hung_is_used_again_when_it_answers(hanging: Bench) -> None:
    until(lambda: hanging.save(4) == 4)
    answers = threading.Event()
    hanging.script["get"] = lambda: answers.wait(60)
    lane = hanging.guard.lanes[0]
    until(lambda: hanging.load(4)[0] == 0 and lane.stats.timeouts > 0)
    hanging.script.clear()  # the call that hangs goes on hanging
    until(lambda: hanging.load(4)[0] == 4)
    answers.set()


def test_what_a_hanging_call_writes_later_reaches_no_page(hanging: Bench) -> None:
    until(lambda: hanging.save(1) == 1)
    begun, answers, written = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        answers.wait(60)

    hanging.script["get"] = hang
    hanging.script["got"] = lambda _: written.set()
    loads: list[tuple[int, list[npt.NDArray[np.uint8]]]] = []

    def load() -> bool:
        loads.append(hanging.load(1))
        return begun.is_set()

    until(load)
    answers.set()
    assert written.wait(60)
    for loaded, into in loads:
        assert loaded == 0
        assert not into[0].any()


def test_a_save_that_was_given_up_while_it_waited_is_not_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages belong to someone else by then, and the checksum would vouch for them."""
    bench = Bench(HANG_S)
    until(lambda: bench.save(1) == 1)
    go = threading.Event()
    readers: list[threading.Thread] = []
    sealed: list[bytes] = []

    def slow_seal(frame: Frame, space: KVNamespace, key: bytes, page: npt.NDArray[np.uint8]) -> None:
        readers.append(threading.current_thread())
        assert go.wait(60)
        seal(frame, space, key, page)
        sealed.append(key)

    put: list[Sequence[bytes]] = []
    proper = Scripted.put

    def noted(self: Scripted, namespace: KVNamespace, keys: Sequence[bytes], *rest: Any) -> list[bool]:
        put.append(keys)
        return proper(self, namespace, keys, *rest)

    monkeypatch.setattr(store_guard, "seal", slow_seal)
    monkeypatch.setattr(Scripted, "put", noted)
    mine = pages(2)[1]

    def save() -> bool:
        assert bench.guard.save(0, KEYS[1:2], [mine], time.monotonic() + TIMEOUT_S) == 0
        return bool(readers)

    until(save)
    mine[:] = 255  # the next owner's
    go.set()
    for reader in readers:
        reader.join(60)
        assert not reader.is_alive()
    assert set(sealed) == {KEYS[1]}
    assert put == []
    bench.guard.close()


def test_a_store_that_never_answers_leaves_a_few_threads_behind_and_no_more(hanging: Bench) -> None:
    answers = threading.Event()
    hanging.script["exists"] = lambda: answers.wait(120)
    before = set(threading.enumerate())
    lane = hanging.guard.lanes[0]

    def new() -> int:
        return sum(thread.name == "kvstore loads" for thread in set(threading.enumerate()) - before)

    def ask() -> bool:
        hanging.count(1)
        return len(lane._hanging) == store_lane._HANGING

    until(ask)
    timeouts = lane.stats.timeouts
    for _ in range(50):  # probes are due all the while
        hanging.count(1)
        time.sleep(0.01)
    assert new() == store_lane._HANGING
    assert lane.stats.timeouts == timeouts
    answers.set()


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
    assert guard.count(0, KEYS[:2], time.monotonic() + TIMEOUT_S) == 0
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
        lane._post(lambda turn: None).done.wait(60)
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
    assert guard.save(0, KEYS[:5], pages(5), time.monotonic() + TIMEOUT_S) == 5  # two of them are gone again
    assert guard.count(0, KEYS[:5], time.monotonic() + TIMEOUT_S) == 0
    for lane in guard.lanes:
        lane._part()
    assert sum(lane.counters.get("evicted", 0) for lane in guard.lanes) == 2
    guard.open()
    assert sum(lane.counters.get("evicted", 0) for lane in guard.lanes) == 2
    guard.close()


def test_deleting_a_namespace_removes_its_pages(bench: Bench) -> None:
    bench.save(3)
    assert bench.guard.delete(0, time.monotonic() + TIMEOUT_S)
    assert bench.count(3) == 0

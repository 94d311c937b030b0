"""Tiers through the whole engine, with the toy model: the same tokens whatever the tiers hold, lose, or do not give."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from tokenspeed.builtin.memory_store import MemoryStore
from tokenspeed.config import EngineConfig
from tokenspeed.engine import build
from tokenspeed.engine import tiers as tiers_module
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kvstore import Frame, KVNamespace, KVStoreContext
from tokenspeed.messages import SamplingParams, TierStats, TokenOutput
from tokenspeed.runtime import store_lane
from tokenspeed.runtime.cache_executor import CacheExecutor
from tokenspeed.runtime.page_copies import PageMove, ThreadCopies
from tokenspeed.weights.describe import describe_model

PAGE = 4
PROMPTS = [[(7 * i + j) % 250 for j in range(40)] for i in range(6)]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0)
Make = Callable[..., LocalEngine]


@pytest.fixture
def engine() -> Iterator[Make]:
    """Makes engines whose device pool holds two prompts of six."""
    made: list[LocalEngine] = []

    def make(**settings: Any) -> LocalEngine:
        common: dict[str, Any] = {
            "block_size": PAGE,
            "chunked_prefill_size": 32,
            "max_num_seqs": 4,
            "max_total_tokens": 96,
        }
        config = EngineConfig(**{"model": "toy", "max_model_len": 96, **common, **settings})
        made.append(LocalEngine(assemble(config, describe_model("toy"), tool_call_parser=None, reasoning_parser=None)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def settle(engine: LocalEngine) -> None:
    """Step until nothing is on its way."""
    end = time.monotonic() + 60
    while tiers(engine).host_moving or busy(engine):
        engine.step()
        assert time.monotonic() < end


def busy(engine: LocalEngine) -> bool:
    return engine._loop._tiers is not None and engine._loop._tiers.busy


def tiers(engine: LocalEngine) -> TierStats:
    stats: TierStats = engine.control("stats").result.tiers
    return stats


def run(engine: LocalEngine, prompts: Sequence[Sequence[int]] = PROMPTS) -> tuple[list[list[int]], list[TokenOutput]]:
    """Prompts one after another, the tiers at rest in between: their tokens, and their last outputs."""
    tokens, ends = [], []
    for prompt in prompts:
        outputs = engine.generate([prompt], GREEDY)[0]
        tokens.append([token for output in outputs for token in output.tokens])
        ends.append(outputs[-1])
        if engine._loop._tiers is not None:
            settle(engine)
    return tokens, ends


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What the toy says without any tier and without a cache."""
    config = EngineConfig(
        model="toy", block_size=PAGE, enable_prefix_caching=False, max_total_tokens=512, max_model_len=96
    )
    plain = LocalEngine(assemble(config, describe_model("toy"), tool_call_parser=None, reasoning_parser=None))
    return run(plain)[0]


def cached(ends: Sequence[TokenOutput]) -> list[int]:
    return [end.stats.cached_tokens for end in ends if end.stats is not None]


def from_store(ends: Sequence[TokenOutput]) -> list[int]:
    return [end.stats.storage_tokens for end in ends if end.stats is not None]


@pytest.mark.parametrize("policy", ["write-through", "write-on-evict", "selective"])
def test_what_the_device_has_no_room_for_comes_back_from_the_host(
    engine: Make, expected: list[list[int]], policy: str
) -> None:
    """Six prompts take turns three times; selective keeps what a second request has used, which needs room on the device for it."""
    small = engine(kvstore_ratio=6.0, kvstore_write_policy=policy)
    prompts = PROMPTS if policy != "selective" else [prompt for prompt in PROMPTS for _ in range(2)]
    for _ in range(2):
        run(small, prompts)
    tokens, ends = run(small)
    assert tokens == expected
    assert cached(ends) == [36] * 6
    assert sum(end.stats.host_tokens for end in ends if end.stats) >= 4 * 36
    figures = tiers(small)
    assert figures.loaded_back >= 36
    assert figures.written_back_bytes > 0
    assert (figures.write_backs_failed, figures.load_backs_failed, figures.reloads) == (0, 0, 0)


def test_without_a_host_tier_nothing_comes_back(engine: Make, expected: list[list[int]]) -> None:
    small = engine()
    run(small)
    tokens, ends = run(small)
    assert tokens == expected
    assert cached(ends) == [0] * 6
    assert small.control("stats").result.tiers is None


@pytest.mark.parametrize("overlap", [False, True])
def test_many_at_once_under_pressure_say_the_same(engine: Make, expected: list[list[int]], overlap: bool) -> None:
    """Retraction, write-backs and load-backs of several requests in the same steps."""
    small = engine(kvstore_ratio=6.0, disable_overlap_schedule=not overlap)
    for _ in range(3):
        outputs = small.generate(PROMPTS, GREEDY)
        assert [[t for output in each for t in output.tokens] for each in outputs] == expected


def test_kv_16_copies_that_lag_behind_bring_what_their_names_say(
    engine: Make, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of many steps wait in line while later steps write, evict and reuse pages: a name never stands for what another wrote."""
    rng = random.Random(1)
    write, load = ThreadCopies._write_pages, ThreadCopies._load_part

    def slow_write(self: ThreadCopies, move: PageMove) -> None:
        time.sleep(rng.uniform(0, 0.02))
        write(self, move)

    def slow_load(self: ThreadCopies, move: PageMove, index: int) -> None:
        time.sleep(rng.uniform(0, 0.01))
        load(self, move, index)

    monkeypatch.setattr(ThreadCopies, "_write_pages", slow_write)
    monkeypatch.setattr(ThreadCopies, "_load_part", slow_load)
    small = engine(kvstore_ratio=1.5)
    for _ in range(8):
        order = rng.sample(range(6), 6)
        outputs = small.generate([PROMPTS[i] for i in order], GREEDY)
        assert [[t for output in each for t in output.tokens] for each in outputs] == [expected[i] for i in order]
    assert tiers(small).loaded_back > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_load_back_is_computed(
    engine: Make, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """With overlap the next step of the request is queued already when the failure is known: its tokens do not count either."""
    small = engine(kvstore_ratio=6.0, disable_overlap_schedule=not overlap)
    run(small)

    def fail(self: ThreadCopies, move: PageMove, index: int) -> None:
        for pages in self._bytes[move.group][index]:
            pages[move.device] = 255  # what was to come is garbage
        raise MemoryError("lost")

    monkeypatch.setattr(ThreadCopies, "_load_part", fail)
    tokens, _ = run(small)
    assert tokens == expected
    figures = tiers(small)
    assert figures.reloads >= 4
    assert figures.load_backs_failed >= 4 * 9
    monkeypatch.undo()
    tokens, ends = run(small)
    assert tokens == expected
    assert max(cached(ends)) == 36


def test_a_failed_write_back_is_a_miss(
    engine: Make, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = engine(kvstore_ratio=6.0)

    def fail(self: ThreadCopies, move: PageMove) -> None:
        raise MemoryError("lost")

    monkeypatch.setattr(ThreadCopies, "_write_pages", fail)
    run(small)
    tokens, ends = run(small)
    assert tokens == expected
    assert cached(ends) == [0] * 6
    assert tiers(small).write_backs_failed > 0


#: The deadline is none that a call of these tests should come near to.
STORE: dict[str, Any] = {
    "kvstore": "memory",
    "kvstore_ratio": 6.0,
    "prefetch_threshold": 8,
    "kvstore_timeout_ms": 60_000.0,
}


def test_the_store_gives_what_device_and_host_have_lost(engine: Make, expected: list[list[int]]) -> None:
    small = engine(**STORE)
    run(small)
    small.control("flush_cache")
    tokens, ends = run(small)
    assert tokens == expected
    assert from_store(ends) == [36] * 6
    figures = tiers(small)
    assert figures.prefetched == 54
    assert figures.lookup_hits == 6
    assert figures.prefetched_bytes > 0


def test_engines_share_pages_exactly_where_what_they_write_is_equal(
    engine: Make, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One store for all of them: another element type, of the model or of the cache, or another page size finds nothing in it."""
    shared: dict[str, Any] = {}
    monkeypatch.setattr(tiers_module, "KVStoreContext", lambda **fields: KVStoreContext(**{**fields, "shared": shared}))
    run(engine(**STORE))
    for change, found in (
        ({}, 36),
        ({"dtype": "bfloat16"}, 0),
        ({"kv_cache_dtype": "bfloat16"}, 0),
        ({"block_size": 2 * PAGE}, 0),
    ):
        tokens, ends = run(engine(**{**STORE, **change}))
        assert from_store(ends) == [found] * 6, change
        assert change or tokens == expected


def test_each_rank_has_namespaces_of_its_own(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank holds of a layer is found by the same rank of as many, and by nobody else."""
    made: list[tuple[Any, ...]] = []
    proper = build.make_cache

    def noted(*arguments: Any, rank: int, world_size: int) -> CacheExecutor | None:
        made.append(arguments)
        return proper(*arguments, rank=rank, world_size=world_size)

    monkeypatch.setattr(build, "make_cache", noted)
    engine(**STORE)
    ids: list[str] = []
    for rank, world_size in ((0, 1), (0, 2), (1, 2), (1, 4)):
        executor = proper(*made[0], rank=rank, world_size=world_size)
        assert executor is not None
        assert executor.store is not None
        assert {(space.rank, space.world_size) for space in executor.store.namespaces} == {(rank, world_size)}
        ids += [space.id for space in executor.store.namespaces]
        executor.close()
    assert len(set(ids)) == len(ids)


def test_less_than_the_threshold_is_not_asked_for(engine: Make, expected: list[list[int]]) -> None:
    small = engine(**{**STORE, "prefetch_threshold": 37})
    run(small)
    small.control("flush_cache")
    tokens, ends = run(small)
    assert tokens == expected
    assert from_store(ends) == [0] * 6
    assert tiers(small).prefetched == 0


def test_a_salt_is_not_shared_through_the_store(engine: Make) -> None:
    small = engine(**STORE)
    run(small, PROMPTS[:1])
    small.control("flush_cache")
    rid = small.add_request(PROMPTS[0], GREEDY, salt=b"another tenant")
    ends = []
    while not ends:
        ends = [output for output in small.step() if output.rid == rid and output.finish]
    assert cached(ends) == [0]


def broken(monkeypatch: pytest.MonkeyPatch, call: str, how: Callable[[], None]) -> None:
    """Let ``call`` of the store do something else first. A lane that falls stays down: no probe meets what the test looks at."""
    monkeypatch.setattr(store_lane, "_FIRST_PAUSE_S", 600.0)
    proper = getattr(MemoryStore, call)

    def instead(self: MemoryStore, *arguments: Any) -> Any:
        how()
        return proper(self, *arguments)

    monkeypatch.setattr(MemoryStore, call, instead)


@pytest.mark.parametrize("call", ["exists", "get_into", "put"])
def test_a_store_that_raises_costs_recomputation(
    engine: Make, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    answering = threading.Event()
    answering.set()

    def fail() -> None:
        if not answering.is_set():
            raise ConnectionError("gone")

    broken(monkeypatch, call, fail)
    small = engine(**STORE)
    if call != "put":
        run(small)
        small.control("flush_cache")
    answering.clear()
    tokens, ends = run(small)
    assert tokens == expected
    assert from_store(ends) == [0] * 6
    figures = tiers(small)
    assert figures.store_errors > 0
    assert figures.store_up == (
        (False, True) if call == "get_into" else (True, False) if call == "put" else (False, False)
    )


@pytest.mark.parametrize("answer", [None, [True], "yes", [1] * 6], ids=repr)
@pytest.mark.parametrize("call", ["exists", "get_into", "put"])
def test_a_store_that_answers_wrong_costs_recomputation(
    engine: Make, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, call: str, answer: object
) -> None:
    """Another type than the interface says, or another length: requests end as they would without a store."""
    monkeypatch.setattr(store_lane, "_FIRST_PAUSE_S", 600.0)
    small = engine(**STORE)
    if call != "put":
        run(small)
        small.control("flush_cache")
    monkeypatch.setattr(MemoryStore, call, lambda *_: answer)
    tokens, ends = run(small)
    assert tokens == expected
    assert from_store(ends) == [0] * 6
    figures = tiers(small)
    assert figures.store_errors > 0
    assert not all(figures.store_up)


def test_a_store_that_hangs_costs_one_deadline(
    engine: Make, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    answers.set()
    broken(monkeypatch, "get_into", lambda: answers.wait(60) and None)
    small = engine(**{**STORE, "kvstore_timeout_ms": 2000.0})
    run(small)
    small.control("flush_cache")
    answers.clear()
    began = time.monotonic()
    first, _ = run(small, PROMPTS[:1])
    assert time.monotonic() - began < 30  # not what the store takes
    rest, _ = run(small, PROMPTS[1:])
    answers.set()
    assert first + rest == expected
    figures = tiers(small)
    assert figures.store_timeouts == 1
    assert figures.bypassed > 0
    assert figures.store_up[0] is False


def test_a_damaged_page_ends_the_hit_before_it(
    engine: Make, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = engine(**STORE)
    run(small)
    small.control("flush_cache")
    proper = MemoryStore.get_into

    def damage(
        self: MemoryStore, space: KVNamespace, keys: Sequence[bytes], frames: Sequence[Frame], timeout_s: float
    ) -> list[bool]:
        answer = proper(self, space, keys, frames, timeout_s)
        if len(frames) > 4:
            frames[4][-1] ^= 1
        return answer

    monkeypatch.setattr(MemoryStore, "get_into", damage)
    tokens, ends = run(small)
    assert tokens == expected
    assert from_store(ends) == [16] * 6
    assert tiers(small).bad_pages == 6


def test_what_was_not_stored_yet_is_stored_before_the_engine_ends(tmp_path: Path) -> None:
    """The end waits for pages on their way: what the last requests computed is there after a restart."""
    config = EngineConfig(model="toy", block_size=PAGE, max_total_tokens=96, max_model_len=96, **STORE)
    small = LocalEngine(assemble(config, describe_model("toy"), tool_call_parser=None, reasoning_parser=None))
    small.generate(PROMPTS[:2], GREEDY)
    executor = small._loop._tiers._own  # type: ignore[union-attr]
    small.close()
    assert executor.store is not None
    assert executor.store.counters.saved >= 2 * 10


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_ends_in_the_midst_of_requests_at_any_step(overlap: bool) -> None:
    """Rows in flight, waiting and retracted ones: all are aborted, and every page whose copy to the host began gets to the store."""
    settings = {"max_num_seqs": 4, "chunked_prefill_size": 32, "disable_overlap_schedule": not overlap, **STORE}
    config = EngineConfig(model="toy", block_size=PAGE, max_total_tokens=96, max_model_len=96, **settings)
    assembly = assemble(config, describe_model("toy"), tool_call_parser=None, reasoning_parser=None)
    for steps in range(1, 15):
        small = LocalEngine(assembly)
        own = small._loop._tiers._own  # type: ignore[union-attr]
        for prompt in PROMPTS:
            small.add_request(prompt, SamplingParams(max_new_tokens=40, temperature=0.0))
        for _ in range(steps):
            small.step()
        scheduler = small._loop._scheduler
        small.close()
        stats = scheduler.stats()
        assert (stats.running, stats.waiting, stats.cache_ops_in_flight) == (0, 0, 0)
        assert stats.pages_stored == stats.pages_written_back == own.stats.written_back
        assert own._copies._thread.is_alive() is False  # type: ignore[attr-defined]


def test_what_raises_at_the_end_leaves_no_thread_and_no_socket(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's fault that shows only at the end is raised when the store, the copies and the KV events have been closed."""
    events_config = '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:*"}'
    small = engine(**STORE, kv_events_config=events_config, disable_overlap_schedule=False)
    loop = small._loop
    own, events = loop._tiers._own, loop._kv_events  # type: ignore[union-attr]
    small.add_request(PROMPTS[0], GREEDY)
    while not loop._flights:  # the store is asked first
        small.step()
    monkeypatch.setattr(loop, "_advance", lambda flight: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        small.close()
    assert not own._copies._thread.is_alive()  # type: ignore[attr-defined]
    assert events is not None
    assert not events._thread.is_alive()
    small.close()  # twice is once


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kvstore_ratio": 1.0, "kvstore_size": 1 << 20}, "give one of them"),
        ({"kvstore_size": 10}, "holds no page"),
        ({"kvstore_write_policy": "back"}, "choose from write-through, write-on-evict, selective"),
        ({"prefetch_threshold": 0}, "--prefetch-threshold 0"),
        ({"kvstore_timeout_ms": 0.0}, "--kvstore-timeout-ms 0"),
        ({"kvstore": "memory", "kvstore_ratio": 0.0}, "a KV store needs one"),
        ({"kvstore_ratio": 1.0, "enable_prefix_caching": False}, "--kvstore-ratio 1.0: --no-enable-prefix-caching"),
        ({"kvstore_size": 1 << 20, "enable_prefix_caching": False}, "--kvstore-size 1048576: --no-enable-prefix-cach"),
        ({"kvstore": "memory", "enable_prefix_caching": False}, "--kvstore memory: --no-enable-prefix-caching"),
        ({"kvstore_ratio": 1e30}, r"--kvstore-ratio 1e\+30: it must be at most 1000000"),
        ({"kvstore_ratio": -1.0}, "--kvstore-ratio -1.0: it must be at least 0"),
        ({"kvstore_timeout_ms": 1e30}, "it must be at most 86400000"),
        ({"kvstore_size": 1 << 70}, "it must be at most 4611686018427387904"),
        ({"prefetch_threshold": 10**20}, "--prefetch-threshold 100000000000000000000: it must be at most 1073741824"),
        ({"kvstore_size": 1 << 50}, "lower --kvstore-ratio or --kvstore-size"),
        ({"kvstore": "memry"}, "did you mean"),
    ],
)
def test_settings_that_cannot_work_are_refused(engine: Make, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(**settings)


@pytest.mark.parametrize(
    ("ranks", "pinned", "fits"),
    [(1, True, True), (2, True, True), (2, False, False), (8, True, False), (8, False, False)],
)
def test_the_host_tiers_of_all_ranks_fit_into_the_machine(
    monkeypatch: pytest.MonkeyPatch, ranks: int, pinned: bool, fits: bool
) -> None:
    """Of 100 GiB, 60 are free: two times 40 fit where the second rank sees what the first one has taken, and eight times 40 never."""
    gib = 1 << 30
    monkeypatch.setattr(tiers_module.os, "sysconf", {"SC_PAGE_SIZE": gib, "SC_PHYS_PAGES": 100}.__getitem__)
    monkeypatch.setattr(tiers_module, "available_memory", lambda: 60 * gib)
    if fits:
        tiers_module._check_memory(40 * gib, ranks=ranks, pinned=pinned)
        return
    with pytest.raises(ConfigError, match=rf"40.0 GiB in each of {ranks} ranks .* lower --kvstore-ratio"):
        tiers_module._check_memory(40 * gib, ranks=ranks, pinned=pinned)


def new_threads(before: set[threading.Thread]) -> list[str]:
    """Names of the tiers' threads that run and are not of ``before``."""
    return [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("kv")]


def wait_until_gone(before: set[threading.Thread]) -> None:
    end = time.monotonic() + 60
    while names := new_threads(before):
        assert time.monotonic() < end, names
        time.sleep(0.01)


def test_a_store_that_ends_the_start_leaves_no_thread(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())

    def refuse() -> None:
        raise ConfigError("give another directory")

    broken(monkeypatch, "exists", refuse)
    with pytest.raises(ConfigError, match="another directory"):
        engine(**STORE)
    wait_until_gone(before)


def test_a_start_that_fails_late_leaves_no_thread(engine: Make) -> None:
    """The KV events' address is in use: found out when the tiers have their threads already."""
    before = set(threading.enumerate())
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        taken.bind("tcp://127.0.0.1:*")
        port = taken.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]
        events_config = f'{{"enable_kv_cache_events": true, "endpoint": "tcp://*:{port}"}}'
        with pytest.raises(ConfigError, match="cannot be bound"):
            engine(**STORE, kv_events_config=events_config)
    wait_until_gone(before)

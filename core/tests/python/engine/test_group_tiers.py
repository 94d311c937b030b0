"""Tiers below models with windows and states: the same tokens whatever comes back from the host, late, in any order, as garbage or not at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hybrid import GROUPS, HostileCopies, HybridHashModel, TwinHashModel, continuation, prompts

from tokenspeed.config import EngineConfig
from tokenspeed.engine import tiers
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.kv_events.batching import events_of
from tokenspeed.engine.local import LocalEngine
from tokenspeed.engine.report import capacity_text
from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kvstore import KVStoreContext
from tokenspeed.messages import SamplingParams
from tokenspeed.runtime.graphs import DecodeGraphs
from tokenspeed.runtime.mixed_graphs import MixedGraphs
from tokenspeed.testing.kv_events import PrefixMirror
from tokenspeed.weights.describe import describe_model

Make = Callable[..., Any]
POLICIES = ("write-through", "write-on-evict", "selective")
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


@pytest.fixture
def make(make_rig: Make) -> Make:
    """Makes engines around the model whose device holds a few of many requests; pages of the full groups, the window group and the states. Copies are
    hostile ones unless ``seed`` is ``None``."""

    def rig(
        *,
        pages: tuple[int, int, int] = (16, 12, 6),
        host: tuple[int, int, int] | None = (80, 60, 30),
        seed: int | None = 0,
        failing: float = 0.0,
        policy: str = "write-through",
        **options: Any,
    ) -> Any:
        full, window, states = pages
        below = {} if host is None else {"host_pages": [*host, host[0]], "kvstore_write_policy": policy}
        if host is not None and seed is not None:
            below["copies"] = partial(HostileCopies, seed=seed, failing=failing)
        return make_rig(
            make_model=HybridHashModel,
            groups=GROUPS,
            pages=full,
            further_pages=[window, states, full],
            **{"max_num_seqs": 4, **below, **options},
        )

    return rig


def rounds(rig: Any, asked: Sequence[Sequence[int]], *, count: int = 24, times: int = 3, first: int = 0) -> None:
    """Ask everything several times, each time all at once, and compare with the definition."""
    rig.add(100_000 + first, [1], max_new_tokens=1)  # outputs are expected to be short: more is admitted than fits
    rig.run()
    for turn in range(first, first + times):
        for index, prompt in enumerate(asked):
            rig.add(1000 * turn + index, prompt, max_new_tokens=count)
        rig.run(20_000)
        for index, prompt in enumerate(asked):
            longest = 64 - len(prompt) + 1  # what the pool holds ends a request too
            assert rig.tokens(1000 * turn + index) == continuation(prompt, min(count, longest)), (turn, index)


def moved(rig: Any) -> tuple[list[int], list[int]]:
    """Pages of each group with bytes that went out and came back."""
    return [rig.cache.stats.out[group] for group in range(3)], [rig.cache.stats.back[group] for group in range(3)]


@OVERLAP
@pytest.mark.parametrize("policy", POLICIES)
def test_retracted_and_evicted_requests_come_back_from_the_host_in_every_group(
    make: Make, policy: str, overlap: bool
) -> None:
    rig = make(policy=policy, overlap=overlap)
    rounds(rig, prompts(12, seed=1))
    stats = rig.scheduler.stats()
    assert stats.retractions > 0
    assert stats.host_hit_tokens > 0
    out, back = moved(rig)
    assert min(out) > 0
    assert min(back) > 0
    assert (stats.load_backs_failed, stats.write_backs_failed, stats.reloads) == (0, 0, 0)


@OVERLAP
def test_copies_that_fail_late_and_leave_garbage_change_no_token(make: Make, overlap: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(5):
        rig = make(seed=seed, failing=0.35, policy=POLICIES[seed % 3], overlap=overlap, host=(40, 30, 12))
        rounds(rig, prompts(12, seed=seed))
        stats = rig.scheduler.stats()
        seen["loads"] += stats.load_backs_failed
        seen["writes"] += stats.write_backs_failed
        seen["reloads"] += stats.reloads
        seen.update({f"group {group}": pages for group, pages in enumerate(moved(rig)[1])})
    assert min(seen[what] for what in ("loads", "writes", "reloads", "group 0", "group 1", "group 2")) > 0, seen


def test_without_waiting_for_states_the_tokens_would_be_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of these tests show what they are to show."""
    rig = make()
    monkeypatch.setattr(rig.cache, "wait_states", lambda: None)
    with pytest.raises(AssertionError):
        rounds(rig, prompts(12, seed=1))


@OVERLAP
@pytest.mark.parametrize("host", [None, (80, 60, 30)])
def test_captured_steps_of_three_kinds_give_the_same_tokens_under_pressure(
    make: Make, host: tuple[int, int, int] | None, overlap: bool
) -> None:
    """Rows that fill a captured step up write no page, and step a state that is nobody's."""
    rig = make(host=host, overlap=overlap)
    executor, replays = rig.executor, [0]

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        step()

        def replay() -> None:
            replays[0] += 1
            step()

        return replay

    common: dict[str, Any] = {
        "model": executor._model,
        "backends": [],
        "argmax": executor._sampler._argmax,
        "tables": executor._tables,
        "page_sizes": [4, 4, 0, 4],
        "last_tokens": executor.last_tokens,
        "vocab_size": 997,
        "dtype": torch.float32,
        "max_seq_len": 200,
    }
    graphs = DecodeGraphs(sizes=(2, 4), **common)
    mixed = MixedGraphs(tokens=(16, 32), rows=(4,), **common)
    for each in (graphs, mixed):
        each.capture(capture)
    executor.use_graphs(graphs, mixed)
    rounds(rig, prompts(12, seed=1))
    assert rig.scheduler.stats().retractions > 0
    assert replays[0] > 100
    assert host is None or min(moved(rig)[1]) > 0


@OVERLAP
@pytest.mark.parametrize("failing", [0.0, 0.25])
def test_full_groups_in_lockstep_come_back_whole_from_host_and_store(
    make_rig: Make, failing: float, overlap: bool
) -> None:
    """A page id names a page of each of them, in every tier."""
    rig = make_rig(
        make_model=TwinHashModel,
        groups=TwinHashModel.GROUPS,
        pages=16,
        further_pages=[16],
        host_pages=[80, 80],
        copies=partial(HostileCopies, seed=1, failing=failing),
        max_num_seqs=4,
        overlap=overlap,
        kvstore="memory",
        prefetch_threshold=8,
        kvstore_timeout_ms=60_000.0,
    )
    asked = prompts(12, seed=1)
    rounds(rig, asked)
    assert rig.cache.stats.back[0] > 0
    assert rig.ask("flush_cache").ok
    rounds(rig, asked, times=1, first=3)
    stats = rig.scheduler.stats()
    assert stats.storage_hit_tokens > 0
    assert (stats.reloads > 0) == (failing > 0)


#: The deadline is none that a call of these tests should come near to.
STORE: dict[str, Any] = {"kvstore": "memory", "prefetch_threshold": 8, "kvstore_timeout_ms": 60_000.0}


@OVERLAP
@pytest.mark.parametrize("failing", [0.0, 0.25])
def test_windows_and_states_come_back_from_the_store_when_device_and_host_have_lost_them(
    make: Make, failing: float, overlap: bool
) -> None:
    rig = make(failing=failing, overlap=overlap, **STORE)
    asked = prompts(12, seed=1)
    rounds(rig, asked)
    for turn in range(3, 6):
        assert rig.ask("flush_cache").ok
        rounds(rig, asked, times=1, first=turn)
    stats, counters = rig.scheduler.stats(), rig.cache.store.counters
    assert stats.storage_hit_tokens > 0
    assert (stats.prefetches_failed, counters.bad, counters.lost) == (0, 0, 0)
    assert (stats.reloads > 0) == (failing > 0)


def test_a_prompt_goes_on_at_the_last_boundary_that_the_store_has_for_every_group(make: Make) -> None:
    """Its blocks reach to 44, its last state stands at 40; what is behind that is not brought."""
    rig = make(pages=(64, 48, 24), **STORE)
    prompt = list(range(45))
    rig.add(1, prompt, max_new_tokens=1)
    rig.run()
    assert rig.ask("flush_cache").ok
    rig.add(2, prompt, max_new_tokens=9)
    rig.run()
    assert rig.tokens(2) == continuation(prompt, 9)
    stats = rig.last(2).stats
    assert (stats.cached_tokens, stats.host_tokens, stats.storage_tokens) == (40, 40, 40)
    assert rig.scheduler.stats().pages_prefetched == 10 + 2 + 1


@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("how", ["gone", "garbage"])
def test_a_part_of_one_group_that_the_store_has_lost_or_damaged_changes_no_token(
    make: Make, group: int, how: str
) -> None:
    """What is gone moves the boundary up before anything is brought; what is damaged is found when it comes, and remembered."""
    rig = make(pages=(64, 48, 24), **STORE)
    prompt = list(range(45))
    rig.add(1, prompt, max_new_tokens=1)
    rig.run()
    assert rig.ask("flush_cache").ok
    guard = rig.cache.store
    frames, space = guard.lanes[0].call(lambda turn: turn.store, 5.0)._kept.frames, guard.namespaces[group].id
    names = rig.scheduler.calc_rolling_hash(prompt)
    last = (space, bytes(names[9]))  # the tenth block: of the full groups, the window before 40, and the state there
    assert last in frames
    if how == "gone":
        del frames[last]
    else:
        frames[last] = bytes(len(frames[last]))
    for rid in (2, 3):
        rig.add(rid, prompt, max_new_tokens=9)
        rig.run()
        assert rig.tokens(rid) == continuation(prompt, 9)
        assert rig.ask("flush_cache").ok
    assert rig.last(2).stats.storage_tokens < 40
    assert guard.counters.bad == (1 if how == "garbage" else 0)
    assert rig.scheduler.stats().prefetches_failed == guard.counters.bad


@OVERLAP
def test_copies_of_a_thread_bring_the_same(make: Make, overlap: bool) -> None:
    """As an engine on a CPU has them."""
    rig = make(seed=None, overlap=overlap)
    rounds(rig, prompts(12, seed=2))
    assert min(moved(rig)[1]) > 0


@OVERLAP
def test_a_session_comes_back_on_prefetch_in_every_group(make: Make, overlap: bool) -> None:
    """Under pressure it went down to the host; its next turn finds it on the device, at the last boundary that every group can resume from."""
    rig = make(pages=(24, 18, 10), host=(120, 90, 45), policy="write-on-evict", overlap=overlap)
    prompt = list(range(50, 71))
    rig.add(1, prompt, max_new_tokens=12, session=5, retain_us=3_600_000_000)
    rig.run()
    answer = rig.tokens(1)
    assert answer == continuation(prompt, 12)
    for index in range(4):  # each as wide as the device
        rig.add(10 + index, list(range(100 * index + 100, 100 * index + 180)), max_new_tokens=4)
        rig.run()
    back = moved(rig)[1]
    reply = rig.ask("prefetch_session", 5)
    assert reply.ok
    assert reply.result > 0
    rig.run()
    assert [now > before for now, before in zip(moved(rig)[1], back, strict=True)] == [True] * 3
    again = [*prompt, *answer, 7, 8]
    rig.add(2, again, max_new_tokens=9)
    rig.run()
    assert rig.tokens(2) == continuation(again, 9)
    stats = rig.last(2).stats
    assert (stats.cached_tokens, stats.host_tokens) == (32, 0)


def test_a_group_is_told_of_by_its_own_figures(make: Make) -> None:
    rig = make()
    rounds(rig, prompts(6, seed=1), times=1)
    groups = rig.gauges.now().groups
    assert [(each.group, each.kind) for each in groups] == [(0, "full"), (1, "window"), (2, "recurrent")]
    assert [each.active + each.cached + each.free for each in groups] == [16, 12, 6]
    assert [each.host_total for each in groups] == [80, 60, 30]
    out, back = moved(rig)
    assert ([each.written_back for each in groups], [each.loaded_back for each in groups]) == (out, back)


@OVERLAP
def test_a_subscriber_of_kv_events_rebuilds_every_group(make: Make, overlap: bool) -> None:
    """Pages of windows and states come without tokens, and stand for themselves: what their block follows may be gone."""
    rig, mirror = make(overlap=overlap, kv_events_config='{"enable_kv_cache_events": true}'), PrefixMirror()
    asked, sizes = prompts(12, seed=1), [group.page_size for group in rig.scheduler.config.groups]
    for turn in range(2):
        for index, prompt in enumerate(asked):
            rig.add(100 * turn + index, prompt, max_new_tokens=24)
        rig.run(20_000)
        for event in events_of(rig.scheduler.drain_kv_events(), sizes):
            mirror.apply_event(event)
        stats = rig.scheduler.stats()
        for group in range(3):
            assert len(mirror.tier("GPU", group)) == stats.pages_cached[group], group
            assert len(mirror.tier("CPU", group)) == stats.host_pages_cached[group], group
            assert stats.pages_cached[group]
            assert stats.host_pages_cached[group]
    assert rig.ask("flush_cache").ok
    for event in events_of(rig.scheduler.drain_kv_events(), sizes):
        mirror.apply_event(event)
    assert not any(mirror.pages.values())


def test_a_hit_that_a_state_cut_says_so(make: Make) -> None:
    """Ten pages of the prefix are there, and the last state that was kept is that of eight."""
    rig = make(pages=(64, 48, 24))
    rig.add(1, list(range(45)), max_new_tokens=1)
    rig.run()
    rig.add(2, [*range(43), 900, 901], max_new_tokens=1)
    rig.run()
    stats = rig.last(2).stats
    assert (stats.cached_tokens, stats.hit_cut, stats.hit_cut_group) == (40, "new", 0)
    rig.add(3, [*range(38), 900, 901], max_new_tokens=1)
    rig.run()
    stats = rig.last(3).stats
    assert (stats.cached_tokens, stats.hit_cut_group) == (32, 2)


TYPES = ["full_attention", "sliding_attention", "linear_attention", "full_attention"]
Toy = Callable[..., LocalEngine]


@pytest.fixture
def toy() -> Iterator[Toy]:
    """Makes engines around the built-in model with a layer of each kind."""
    made: list[LocalEngine] = []

    def engine(types: Sequence[str] = TYPES, **settings: Any) -> LocalEngine:
        model = describe_model("toy")
        shape = {
            "num_hidden_layers": len(types),
            "layer_types": list(types),
            "sliding_window": 10,
            "state_interval": 16,
        }
        config = EngineConfig(model="toy", plugins="none", num_threads=1, **{"block_size": 4, **settings})
        made.append(LocalEngine(assemble(config, replace(model, config=model.config | shape))))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def drawn(engine: LocalEngine, asked: Sequence[Sequence[int]], count: int = 24) -> list[list[int]]:
    params = SamplingParams(count, temperature=0.0, ignore_eos=True)
    return [[t for item in outputs for t in item.tokens] for outputs in engine.generate(asked, params)]


ASKED = [[token % 256 for token in prompt] for prompt in prompts(10, seed=2)]
WITHOUT_FULL = ["sliding_attention", "linear_attention", "sliding_attention"]


@pytest.mark.parametrize("types", [TYPES, WITHOUT_FULL], ids=["with full attention", "without"])
def test_a_real_model_of_several_kinds_gives_the_same_tokens_from_the_host(toy: Toy, types: list[str]) -> None:
    plain = toy(types, max_total_tokens=4096, enable_prefix_caching=False, max_num_seqs=1)
    alone = [drawn(plain, [prompt])[0] for prompt in ASKED]
    small = toy(types, max_total_tokens=80, max_num_seqs=6, kvstore_ratio=12.0)
    drawn(small, [[1]], 1)  # outputs are expected to be short: more is admitted than fits
    for _ in range(3):
        assert drawn(small, ASKED) == alone
    stats = small.control("stats").result
    assert stats.retractions > 0
    assert stats.tiers.loaded_back > 0
    assert min(group.loaded_back for group in stats.groups) > 0
    assert {group.kind for group in stats.groups} == {"full", "window", "recurrent"}


@pytest.mark.parametrize("types", [TYPES, WITHOUT_FULL], ids=["with full attention", "without"])
def test_a_restart_finds_windows_and_states_in_the_store(
    toy: Toy, types: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second engine over the same store."""
    shared: dict[str, Any] = {}
    monkeypatch.setattr(tiers, "KVStoreContext", lambda **fields: KVStoreContext(**{**fields, "shared": shared}))
    asked = [[*prompt, *prompt, *prompt] for prompt in ASKED[:4]]
    plain = toy(types, max_total_tokens=4096, enable_prefix_caching=False, max_num_seqs=1)
    alone = [drawn(plain, [prompt])[0] for prompt in asked]
    settings: dict[str, Any] = {**STORE, "max_total_tokens": 800, "max_num_seqs": 4, "kvstore_ratio": 4.0}
    first = toy(types, **settings)
    assert drawn(first, asked) == alone
    first.close()
    again = toy(types, **settings)
    assert drawn(again, asked) == alone
    stats = again.control("stats").result
    assert stats.tiers.storage_hit_tokens > 0
    assert stats.tiers.bad_pages == 0
    assert min(group.loaded_back for group in stats.groups if group.kind != "full") > 0


def test_a_model_without_full_attention_has_its_budget_for_windows_and_states(toy: Toy) -> None:
    """Blocks cost nothing there, and there are enough of them to name what the others keep."""
    engine = toy(WITHOUT_FULL, kv_cache_memory_bytes=4 << 20, max_num_seqs=8, max_model_len=1024, kvstore_ratio=1.5)
    full, window, states = engine.info.groups
    assert 4_000_000 < engine.info.kv_bytes <= 4 << 20
    assert (full.page_bytes, full.pages) == (0, 2 * 8 * 256)
    assert window.pages * window.page_bytes + states.pages * states.page_bytes > 4_000_000
    assert engine.info.host_bytes == window.host_pages * window.page_bytes + states.host_pages * states.page_bytes
    assert drawn(engine, [[1, 2, 3]]) == drawn(toy(WITHOUT_FULL, max_total_tokens=4096), [[1, 2, 3]])


def test_the_running_engine_says_what_each_group_has(toy: Toy) -> None:
    engine = toy(max_total_tokens=400, max_num_seqs=8, max_model_len=256, kvstore_ratio=2.0)
    full, window, states = engine.info.groups
    assert (full.pages, full.host_pages) == (100, 200)
    config = EngineConfig(model="toy", session_retain_percent=0)
    lines = [line.strip() for line in capacity_text(config, engine.info).splitlines()]
    assert lines[-4].startswith("host tier         200 pages, ")
    assert lines[-3:] == [
        f"cache group       0 full: 100 pages of {full.page_bytes / 1024:.1f} KiB, 200 on the host",
        f"cache group       1 window of 10 tokens: {window.pages} pages of {window.page_bytes / 1024:.1f} KiB, {2 * window.pages} on the host",
        f"cache group       2 states, kept every 16 tokens: {states.pages} states of {states.page_bytes} bytes, {2 * states.pages} on the host",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kvstore_size": 4096}, r"--kvstore-size: the host tier holds \d of .* that makes a .* of use; raise it"),
        (
            {"kvstore_ratio": 0.01},
            r"--kvstore-ratio: the host tier holds \d of 3 times 1024 bytes, .* page of a window of 10 tokens of use",
        ),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8: the model's recurrent states are of the cache's type"),
        ({"block_size": 32}, "--block-size 32: the model's states can be kept every 16 tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(toy: Toy, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        toy(max_total_tokens=4096, max_num_seqs=4, **settings)

"""The tiers below the device through the binding: views, answers, events, sessions."""

from __future__ import annotations

import numpy as np
import pytest
from engine_model import Engine, make_config

import tokenspeed._scheduler as ts

COLUMNS = {
    "write_back": ("op", "group", "device", "host"),
    "load_back": ("op", "group", "host", "device", "row"),
    "lookup": ("op", "group", "hash"),
    "prefetch": ("op", "group", "host", "hash"),
    "store": ("op", "group", "host", "hash"),
}
DTYPES = {"op": np.int64, "hash": np.uint8}


def serve(engine: Engine, id: int, tokens: list[int], **options: int) -> None:
    assert engine.submit(id, tokens, 1, **options).accepted
    engine.drain()


def test_transfer_arrays_are_read_only_views_of_the_declared_type() -> None:
    engine = Engine(make_config(host=16, l3=True, prefetch_threshold=4))
    engine.submit(1, list(range(9)))
    filled = set()
    for _ in range(8):
        plan = engine.plan()
        entries = 0
        for kind, columns in COLUMNS.items():
            arrays = [getattr(plan, f"{kind}_{column}") for column in columns]
            for column, array in zip(columns, arrays, strict=True):
                assert array.dtype == DTYPES.get(column, np.int32), (kind, column)
                assert array.shape == (len(arrays[0]), 16) if column == "hash" else array.shape == (len(arrays[0]),)
                if array.size:
                    filled.add(kind)
                    assert not array.flags.writeable
                    assert np.shares_memory(array, getattr(plan, f"{kind}_{column}"))
            entries += len(arrays[0])
        assert plan.num_transfers == entries
        if plan.num_rows:
            engine.advance()
        for op in list(engine.tiers.open):
            engine.answer(op)
    assert filled == {"write_back", "lookup", "store"}


def test_what_the_device_lost_comes_back_from_the_host_and_after_a_restart_from_the_store() -> None:
    config = make_config(pages=16, budget=100, host=40, l3=True, prefetch_threshold=8, prefetch_timeout_us=1000)
    engine = Engine(config)
    serve(engine, 1, list(range(41)))
    serve(engine, 2, list(range(1000, 1060)))
    serve(engine, 3, list(range(41)))
    info = engine.scheduler.request_info(3)
    assert info is not None
    assert (info.cached_tokens, info.storage_tokens) == (40, 0)
    assert info.host_tokens > 0
    stored = engine.tiers.stored
    assert (0, engine.scheduler.calc_rolling_hash(list(range(41)))[9].tobytes()) in stored

    restarted = Engine(config)
    restarted.tiers.stored = stored
    serve(restarted, 1, list(range(41)))
    info = restarted.scheduler.request_info(1)
    assert info is not None
    assert (info.cached_tokens, info.host_tokens, info.storage_tokens) == (40, 40, 40)
    stats = restarted.scheduler.stats()
    assert (stats.storage_hit_tokens, stats.pages_prefetched, stats.lookups, stats.lookup_hits) == (40, 10, 1, 1)


@pytest.mark.parametrize(
    ("ops", "pages", "message"),
    [([99], [1], "transfer 99 is not in flight"), ([1], [3], "has 2 pages"), ([1, 1], [2, 2], "answered once"), ([1], [], "one count")],
)  # fmt: skip
def test_a_wrong_answer_is_refused_and_changes_nothing(ops: list[int], pages: list[int], message: str) -> None:
    engine = Engine(make_config(host=16))
    engine.submit(1, list(range(9)), 1)
    engine.plan()
    engine.advance()
    engine.plan()
    assert engine.scheduler.cache_ops_in_flight == 1
    with pytest.raises(ValueError, match=message):
        engine.scheduler.cache_done(np.array(ops, np.int64), np.array(pages, np.int32))
    assert engine.scheduler.cache_ops_in_flight == 1
    engine.drain()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"l3": True}, "l3 is set and groups.0..host_pages is 0"),
        ({"host": -1}, "host_pages is -1"),
        ({"retain_percent": 101}, "retain_percent is 101"),
        ({"prefetch_threshold": 0}, "prefetch_threshold is 0"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**fields)


@pytest.mark.parametrize("good", [2, 0], ids=["copied", "copy failed"])
def test_gram_13_a_row_that_fails_while_its_pages_are_copied_gives_them_back_once(good: int) -> None:
    """A grammar's error ends a row with FAIL. The error is what is reported; its pages are free when the copy has ended, and not before."""
    scheduler = ts.Scheduler(make_config(host=16))
    scheduler.submit_requests([ts.RequestSpec(id=1, tokens=list(range(9)), max_new_tokens=9)], 1)

    def step(outcome: ts.Outcome) -> tuple[ts.ExecutionPlan, ts.AdvanceResult]:
        plan = scheduler.next_execution_plan(2)
        result = scheduler.advance(plan.plan_id, [1], [7], [int(outcome)])
        scheduler.check_integrity()
        return plan, result

    step(ts.Outcome.CONTINUE)
    plan, failed = step(ts.Outcome.FAIL)
    (op,) = set(plan.write_back_op.tolist())
    assert len(plan.write_back_op) == 2
    after = scheduler.next_execution_plan(3)
    told = [*zip(failed.finished_ids.tolist(), failed.finished_reasons.tolist(), strict=True)]
    told += zip(after.finished_ids.tolist(), after.finished_reasons.tolist(), strict=True)
    assert told == [(1, ts.FinishReason.FAILED)]

    scheduler.flush_cache()
    scheduler.check_integrity()
    assert scheduler.stats().pages_free[0] == 30, "pages under way are neither free nor lost"
    scheduler.cache_done([op], [good])
    scheduler.check_integrity()
    scheduler.flush_cache()
    stats = scheduler.stats()
    assert (stats.pages_free[0], stats.host_pages_free[0], stats.failed) == (32, 16, 1)
    assert not scheduler.has_work()


def test_events_rebuild_what_each_tier_holds() -> None:
    """A subscriber that replays the events finds the prefixes that the scheduler itself finds."""
    engine = Engine(make_config(pages=10, budget=100, host=12, kv_events=True))
    held: list[dict[bytes, bytes]] = [{}, {}, {}]
    tokens_of: dict[bytes, list[int]] = {}

    def replay() -> None:
        events = engine.scheduler.drain_kv_events()
        at = 0
        for i, kind in enumerate(events.kind.tolist()):
            if kind == 2:
                held[0].clear()
                held[1].clear()
                continue
            tier, name = held[int(events.medium[i])], events.hash[i].tobytes()
            if kind == 1:
                del tier[name]
                continue
            tier[name] = events.parent[i].tobytes()
            count = int(events.token_counts[i])
            if count:
                tokens_of[name] = events.tokens[at : at + count].tolist()
            at += count
        assert at == len(events.tokens)

    for request, base in enumerate([0, 0, 500, 700, 0, 900, 500]):
        serve(engine, request, [*list(range(base, base + 25)), request])
        replay()
        stats = engine.scheduler.stats()
        assert (len(held[0]), len(held[1])) == (stats.pages_cached[0], stats.host_pages_cached[0])
    chain = [row.tobytes() for row in engine.scheduler.calc_rolling_hash(list(range(500, 525)))]
    assert all(name in held[0] for name in chain)
    assert [token for name in chain for token in tokens_of[name]] == list(range(500, 524))
    assert held[0][chain[3]] == chain[2]
    engine.scheduler.flush_cache()
    replay()
    assert not held[0]
    assert not held[1]


def test_a_session_keeps_its_prefix_and_is_brought_up_before_its_next_turn() -> None:
    engine = Engine(make_config(pages=16, budget=100, host=40))
    serve(engine, 1, list(range(29)), session=5, retain_us=1_000_000)
    stats = engine.scheduler.stats()
    assert (stats.sessions, stats.retained_pages) == (1, 7)
    serve(engine, 2, list(range(1000, 1060)))
    missing = engine.scheduler.prefetch_session(5, engine.now)
    assert missing > 0
    assert engine.scheduler.cache_ops_pending == 1
    plan = engine.plan()
    assert plan.load_back_row.tolist() == [-1] * min(missing, len(plan.load_back_row))
    for op in list(engine.tiers.open):
        engine.answer(op)
    assert engine.scheduler.prefetch_session(5, engine.now) == missing - len(plan.load_back_row)
    assert engine.scheduler.release_session(5)
    assert not engine.scheduler.release_session(5)


def test_a_prefetch_whose_own_prefix_is_the_last_page_to_be_had_takes_no_page() -> None:
    """Pinning the part that is there takes it from what can be evicted for the rest."""
    engine = Engine(make_config(pages=4, budget=100, host=16, retain_percent=100))
    serve(engine, 1, list(range(9)), session=5, retain_us=1_000_000)  # two pages are kept, and on the host
    engine.submit(2, list(range(500, 511)), 2)  # takes three of the four: the second of the kept ones goes
    engine.plan()
    stats = engine.scheduler.stats()
    assert (stats.pages_free, stats.pages_cached) == ([0], [1])
    assert engine.scheduler.prefetch_session(5, engine.now) == 1
    engine.advance()
    assert not engine.plan().load_back_op.size
    engine.scheduler.check_integrity()
    engine.advance()
    engine.drain()

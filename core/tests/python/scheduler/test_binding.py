"""What Python sees: views, errors, and the reports through the binding."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from engine_model import Engine, make_config

from tokenspeed import _scheduler as ts

COLUMNS = {
    "request_ids": np.int64, "slots": np.int32, "context_lens": np.int32, "query_lens": np.int32, "input_ids": np.int32,
    "flags": np.int32, "output_lens": np.int32, "delta_group": np.int32, "delta_slot": np.int32, "delta_index": np.int32,
    "delta_page": np.int32, "prefix_intervals": np.int32, "retracted_ids": np.int64, "finished_ids": np.int64,
    "finished_reasons": np.int32,
}  # fmt: skip


def test_plan_arrays_are_read_only_views_of_the_declared_type() -> None:
    engine = Engine(make_config())
    engine.submit(1, list(range(9)))
    plan = engine.plan()
    for name, dtype in COLUMNS.items():
        array = getattr(plan, name)
        assert array.dtype == dtype, name
        assert array.ndim == (2 if name == "prefix_intervals" else 1)
        if array.size:
            assert not array.flags.writeable, name
            assert np.shares_memory(array, getattr(plan, name)), name
    assert plan.prefix_intervals.shape == (0, 4)
    assert plan.mode is ts.ForwardMode.EXTEND


def test_a_view_outlives_the_scheduler_and_growth() -> None:
    engine = Engine(make_config(pages=400, budget=64, model_len=2000))
    engine.submit(1, list(range(9)))
    plan = engine.plan()
    ids = plan.input_ids
    engine.advance()
    for request in range(2, 30):
        engine.submit(request, list(range(1000 * request, 1000 * request + 60)))
    engine.drain()
    del engine, plan
    gc.collect()
    assert ids.shape == (9,)
    assert ids.sum() is not None


def test_a_plan_is_readable_until_the_plan_after_next_and_while_in_flight() -> None:
    engine = Engine(make_config(overlap=1))
    engine.submit(1, list(range(9)), 1)
    plan = engine.plan()
    for _ in range(5):  # nothing more to plan: IDLE plans, while the first is in flight
        assert engine.plan().mode is ts.ForwardMode.IDLE
    assert plan.query_lens.tolist() == [9]
    engine.advance()
    for _ in range(3):
        engine.plan()
    with pytest.raises(RuntimeError, match=f"plan {plan.plan_id} is no longer readable"):
        plan.query_lens  # noqa: B018


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="max_num_seqs is 0; it must be from 1"):
        make_config(seqs=0)
    with pytest.raises(ValueError, match="groups is empty; the first cache group is full"):
        ts.SchedulerConfig(groups=[], max_num_seqs=1, max_batched_tokens=1, max_model_len=10)
    with pytest.raises(ValueError, match=r"step_sizes\[1\] is 16; it must be from 17"):
        make_config(step_sizes=[16, 16])
    with pytest.raises(ValueError, match="position 3 has 2 bytes; it must have 16"):
        ts.RequestSpec(id=1, tokens=[1, 2, 3, 4], max_new_tokens=1, extra_keys=[(3, b"ab")])
    with pytest.raises(TypeError):
        ts.RequestSpec(id=1, tokens=np.array([1 << 40]), max_new_tokens=1)
    engine = Engine(make_config())
    engine.submit(1, list(range(9)))
    plan = engine.plan()
    with pytest.raises(ValueError, match=f"advance plan {plan.plan_id} first"):
        engine.scheduler.next_execution_plan(99)
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="not the oldest in flight"):
        engine.scheduler.advance(plan.plan_id + 1, one, one, zero)
    with pytest.raises(ValueError, match=r"counts has 2 entries; plan .* needs 1"):
        engine.scheduler.advance(plan.plan_id, np.ones(2, np.int32), one, zero)
    with pytest.raises(TypeError):
        engine.scheduler.advance(plan.plan_id, np.ones(1, np.int64), one, zero)
    engine.advance()


def test_steps_under_a_bound_have_whole_sizes() -> None:
    config = make_config(page=4, pages=64, budget=64, max_step_us=1_000, step_sizes=[6, 10, 16])
    assert config.step_sizes == [6, 10, 16]
    scheduler = ts.Scheduler(config)
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    scheduler.submit_requests([ts.RequestSpec(id=1, tokens=[1], max_new_tokens=9)], 0)
    scheduler.advance(scheduler.next_execution_plan(0).plan_id, one, one, zero)
    scheduler.submit_requests([ts.RequestSpec(id=2, tokens=list(range(40)), max_new_tokens=1)], 0)
    plan = scheduler.next_execution_plan(0)
    assert plan.query_lens.tolist() == [16, 1]
    scheduler.advance(plan.plan_id, np.array([0, 1], np.int32), np.ones(2, np.int32), np.zeros(2, np.int32), 1_200)
    assert scheduler.next_execution_plan(0).query_lens.tolist() == [10, 1]  # where 11 fit


def test_refused_requests_say_why_and_others_go_on() -> None:
    engine = Engine(make_config(pages=8, model_len=1000))
    specs = [
        ts.RequestSpec(id=1, tokens=list(range(40)), max_new_tokens=4),
        ts.RequestSpec(id=2, tokens=[], max_new_tokens=4),
        ts.RequestSpec(id=3, tokens=[5, 6], max_new_tokens=1 << 50),
    ]
    results = engine.scheduler.submit_requests(specs, 0)
    assert [result.refusal for result in results] == [
        ts.SubmitRefusal.NEVER_FITS,
        ts.SubmitRefusal.EMPTY_PROMPT,
        ts.SubmitRefusal.NONE,
    ]
    assert "32" in results[0].reason
    assert "--max-total-tokens" in results[0].reason
    assert results[2].accepted


def test_page_hashes_name_prefixes_and_fold_extra_keys_into_their_own_page() -> None:
    scheduler = Engine(make_config()).scheduler
    tokens = np.arange(11, dtype=np.int32)
    plain = scheduler.calc_rolling_hash(tokens)
    assert plain.shape == (2, 16)
    assert plain.dtype == np.uint8
    keyed = scheduler.calc_rolling_hash(tokens, extra_keys=[(5, b"k" * 16)])
    assert (keyed[0] == plain[0]).all()
    assert (keyed[1] != plain[1]).any()
    for other in (scheduler.calc_rolling_hash(tokens, salt=b"x"), scheduler.calc_rolling_hash(tokens, adapter=1)):
        assert (other[0] != plain[0]).any()


def test_page_hashes_follow_their_definition() -> None:
    """Written out with hashlib: what another process or language must compute to find these pages."""
    import hashlib

    tokens = np.arange(8, dtype="<i4")
    seed = hashlib.sha256(
        b"tokenspeed.kv.page.1"
        + (4).to_bytes(8, "little")
        + (3).to_bytes(8, "little")
        + (2).to_bytes(8, "little")
        + b"ab"
    ).digest()[:16]
    first = hashlib.sha256(seed + tokens[:4].tobytes()).digest()[:16]
    second = hashlib.sha256(first + tokens[4:].tobytes() + (1).to_bytes(8, "little") + b"k" * 16).digest()[:16]
    scheduler = Engine(make_config()).scheduler
    hashes = scheduler.calc_rolling_hash(tokens.astype(np.int32), salt=b"ab", extra_keys=[(5, b"k" * 16)], adapter=3)
    assert [row.tobytes() for row in hashes] == [first, second]


def test_request_info_follows_a_request_and_outlives_it() -> None:
    engine = Engine(make_config())
    assert engine.scheduler.request_info(1) is None
    engine.submit(1, list(range(9)), 2)
    info = engine.scheduler.request_info(1)
    assert info is not None
    assert (info.state, info.first_scheduled_us) == ("Submitted", -1)
    engine.drain()
    info = engine.scheduler.request_info(1)
    assert info is not None
    assert (info.state, info.finish_reason) == ("Finished", ts.FinishReason.LENGTH)
    assert (info.prompt_tokens, info.output_tokens, info.cached_tokens) == (9, 2, 0)
    assert info.first_scheduled_us > info.queued_us


def test_aborts_are_reported_once_by_the_next_plan_or_result() -> None:
    engine = Engine(make_config())
    engine.submit(1, list(range(9)))
    assert engine.abort(1)
    assert not engine.abort(1)
    assert not engine.scheduler.has_work()
    engine.plan()
    assert engine.reasons == {1: ts.FinishReason.ABORTED}
    engine.submit(2, list(range(9)))
    engine.plan()
    assert engine.abort(2)
    assert 2 not in engine.reasons
    engine.advance()
    assert engine.reasons[2] == ts.FinishReason.ABORTED


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_stop_from_outside_counts_as_finished_and_admission_learns_from_its_length(in_flight: bool) -> None:
    """E10: traffic that ends by stop strings taught the expected output nothing and looked like aborts."""
    engine = Engine(make_config())
    engine.submit(1, list(range(9)), 50)
    while (info := engine.scheduler.request_info(1)) is not None and info.output_tokens < 3:
        engine.plan()
        engine.advance()
    if in_flight:
        engine.plan()
    assert engine.abort(1, ts.FinishReason.STOP)
    assert not engine.abort(1, ts.FinishReason.STOP)
    engine.drain()
    stats = engine.scheduler.stats()
    assert engine.reasons == {1: ts.FinishReason.STOP}
    assert (stats.finished, stats.aborted, stats.expected_output) == (1, 0, 3)


def test_a_request_is_ended_from_outside_for_two_reasons_only() -> None:
    engine = Engine(make_config())
    engine.submit(1, [1])
    with pytest.raises(ValueError, match="reason is 2; a request is ended from outside as ABORTED or by a STOP"):
        engine.scheduler.abort(1, ts.FinishReason.LENGTH)
    assert engine.live


def test_other_threads_may_ask_while_one_plans() -> None:
    engine = Engine(make_config(pages=64, seqs=4, budget=64))
    stop = threading.Event()
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            while not stop.is_set():
                engine.scheduler.stats()
                engine.scheduler.abort(10_000)
                engine.scheduler.request_info(1)
        except BaseException as error:  # whatever it is, the test must see it
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for request in range(20):
        engine.submit(request, list(range(request, request + 10)), 5)
    engine.drain()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(engine.reasons) == 20

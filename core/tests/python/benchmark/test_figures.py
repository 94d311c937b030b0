"""The figures follow their definitions, and the workload follows its seed."""

from __future__ import annotations

import pytest

from tokenspeed.benchmark.records import Record, percentile, summarize
from tokenspeed.benchmark.workload import WorkloadConfig, make_sessions


def record(start: float, times: list[float], **fields: object) -> Record:
    made = Record(start=start, **fields)  # type: ignore[arg-type]
    for now in times:
        made.add_text("x", now)
    return made


def test_latencies_follow_their_definitions() -> None:
    result = summarize(
        [record(10.0, [10.5, 10.6, 10.9], completion_tokens=5, prompt_tokens=20, cached_tokens=10, finish="length")],
        wall_s=2.0,
    )
    assert result["ttft_ms"]["p50"] == pytest.approx(500)
    assert result["e2e_ms"]["p50"] == pytest.approx(900)
    assert result["tpot_ms"]["p50"] == pytest.approx(400 / 4)
    assert result["itl_ms"]["max"] == pytest.approx(300)
    assert result["output_throughput"] == pytest.approx(2.5)
    assert result["input_throughput"] == pytest.approx(10)
    assert result["cache_hit_rate"] == pytest.approx(0.5)
    assert result["finish"] == {"length": 1}
    assert result["turns"] == []


def test_chunks_count_as_tokens_where_the_server_reports_none() -> None:
    assert summarize([record(0.0, [1.0, 2.0])], wall_s=1.0)["output_tokens"] == 2


def test_a_failed_request_counts_as_failed_and_nothing_else() -> None:
    good, bad = record(0.0, [1.0]), record(0.0, [1.0, 2.0, 3.0], error="HTTP 500")
    result = summarize([good, bad], wall_s=1.0)
    assert (result["ok"], result["failed"], result["output_tokens"]) == (1, 1, 1)
    assert result["errors"] == ["HTTP 500"]


def test_a_run_without_answers_has_no_latencies() -> None:
    result = summarize([], wall_s=0.0)
    assert result["ttft_ms"] is None
    assert result["output_throughput"] == 0


def test_turns_are_reported_apart() -> None:
    runs = [
        record(0.0, [1.0], turn=0, prompt_tokens=10, cached_tokens=0),
        record(2.0, [2.1], turn=1, prompt_tokens=40, cached_tokens=32),
    ]
    first, second = summarize(runs, wall_s=3.0)["turns"]
    assert (first["cache_hit_rate"], second["cache_hit_rate"]) == (0.0, 0.8)
    assert second["ttft_ms"]["p50"] == pytest.approx(100)


@pytest.mark.parametrize(("q", "expected"), [(0, 1.0), (50, 2.5), (100, 4.0), (75, 3.25)])
def test_percentiles_interpolate(q: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(expected)


def config(**changes: object) -> WorkloadConfig:
    base = {
        "kind": "agent",
        "num_prompts": 5,
        "input_len": 6,
        "output_len": 4,
        "prefix_len": 9,
        "sessions": 3,
        "turns": 4,
        "think_time_s": 0.5,
        "seed": 7,
    }
    return WorkloadConfig(**(base | changes))  # type: ignore[arg-type]


def test_a_seed_fixes_every_text_and_pause() -> None:
    assert make_sessions(config()) == make_sessions(config())
    assert make_sessions(config()) != make_sessions(config(seed=8))


def test_agent_sessions_share_their_system_prompt_and_nothing_else() -> None:
    sessions = make_sessions(config())
    assert len(sessions) == 3
    assert len({session.system for session in sessions}) == 1
    assert len(sessions[0].system.split()) == 9
    firsts = {turn.split()[0] for session in sessions for turn in session.turns}
    assert len(firsts) == 12
    assert all(session.pauses_s[0] == 0 and all(session.pauses_s[1:]) for session in sessions)


@pytest.mark.parametrize(("kind", "shared"), [("random", False), ("shared-prefix", True)])
def test_single_turn_workloads(kind: str, shared: bool) -> None:
    sessions = make_sessions(config(kind=kind))
    assert [len(session.turns) for session in sessions] == [1] * 5
    assert all(bool(session.system) is shared for session in sessions)
    assert all(len(session.turns[0].split()) == 6 for session in sessions)

"""The benchmarks measure what they say: ``bench serve`` against a real server, and the arithmetic of the comparison with other servers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from .conftest import ROOT, tokenspeed


@pytest.fixture(scope="module")
def cpu_serving() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_serving", ROOT / "benchmarks" / "cpu_serving.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_bench_serve_measures_sessions_of_several_turns(smollm2: Any) -> None:
    flags = [
        "--workload",
        "agent",
        "--sessions",
        "2",
        "--turns",
        "2",
        "--prefix-len",
        "200",
        "--input-len",
        "8",
        "--output-len",
        "8",
        "--json",
    ]
    done = subprocess.run(
        tokenspeed("bench", "serve", "--base-url", smollm2.url, *flags), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["ok"], result["failed"], result["output_tokens"]) == (4, 0, 32)
    assert result["config"]["model"] == smollm2.model
    first, second = result["turns"]
    assert second["prompt_tokens"] > first["prompt_tokens"] > 200
    assert second["cache_hit_rate"] > 0.7


def test_a_target_is_met_only_by_the_wanted_gain_over_the_best_peer(cpu_serving: ModuleType) -> None:
    summary = {
        "tokenspeed": {
            "c8.output_tok_s": 100.0,
            "c8.ttft_p50_ms": 50.0,
            "shared.wall_s": 10.0,
            "ready_s": 3.0,
            "idle_pss_mb": 1600.0,
        },
        "tokenspeed-bf16": {"c8.output_tok_s": 900.0},
        "slow": {"c8.output_tok_s": 20.0, "c8.ttft_p50_ms": 40.0, "shared.wall_s": 12.0},
        "fast": {"c8.output_tok_s": 95.0, "c8.ttft_p50_ms": 60.0, "shared.wall_s": 30.0},
    }
    verdicts = {row["figure"]: row for row in cpu_serving.verdicts(summary)}
    assert (verdicts["c8.output_tok_s"]["best_peer"], verdicts["c8.output_tok_s"]["met"]) == ("fast", False)
    assert verdicts["c8.output_tok_s"]["gain"] == pytest.approx(100 / 95, abs=1e-3)
    assert (verdicts["c8.ttft_p50_ms"]["best_peer"], verdicts["c8.ttft_p50_ms"]["met"]) == ("slow", False)
    assert (verdicts["shared.wall_s"]["best_peer"], verdicts["shared.wall_s"]["met"]) == ("slow", False)
    assert (verdicts["ready_s"]["met"], verdicts["idle_pss_mb"]["met"]) == (True, False)


def test_medians_are_taken_over_rounds_and_errors_added_up(cpu_serving: ModuleType) -> None:
    rounds = [{"a": {"x": value, "c1.errors": 1.0}} for value in (3.0, 1.0, 2.0)]
    assert cpu_serving.summarize(rounds) == {"a": {"x": 2.0, "c1.errors": 3.0}}


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process tree is read from /proc")
def test_memory_counts_the_whole_process_tree(cpu_serving: ModuleType) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'x = b\"x\" * 2**26; print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert len(cpu_serving.process_tree(parent.pid)) == 2
        assert cpu_serving.pss_mb(parent.pid) > 64
        assert os.getpid() not in cpu_serving.process_tree(parent.pid)
        parent.communicate(b"\n")

"""The bound on steps with decodes, by ``benchmarks/step_bound_sim.py``: the scheduler on a device that is a formula, so nothing here looks at the clock."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_bound_sim", ROOT / "benchmarks" / "step_bound_sim.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_formula_gives_what_an_h200_was_measured_at(sim: ModuleType) -> None:
    quiet = sim.Device(noise=0.0)
    alone = sim.Simulation(0, quiet)
    alone.submit(alone.tokens(8192), 1)
    alone.run()
    assert alone.report.ttfts[0] == pytest.approx(213, rel=0.05)
    decodes = sim.Simulation(0, quiet)
    decodes.decodes(32, 1024, 4000)
    decodes.run(until=lambda: len(decodes.steps) > 50)
    assert statistics.median(decodes.report.gaps) == pytest.approx(6.32, rel=0.1)
    agents = sim.Simulation(0, quiet)
    sim.agent64(agents)
    assert agents.steps[0] == (8192, 0, pytest.approx(256, rel=0.05))
    assert next(ms for step in agents.steps for ms in step[2:] if step[:2] == (0, 64)) == pytest.approx(8.3, rel=0.05)


@pytest.mark.parametrize("bound_ms", [21.0, 24.0])
def test_a_lone_prompt_among_decodes_keeps_the_bound(sim: ModuleType, bound_ms: float) -> None:
    simulation = sim.Simulation(bound_ms, sim.Device())
    gaps = sim.gap(simulation, arrivals=4).figures()
    assert gaps["gap_max"] <= 1.1 * bound_ms
    assert gaps["gap_p99"] <= 1.04 * bound_ms


def test_a_bound_of_24_ms_reaches_the_gaps_and_the_first_tokens_of_the_table(sim: ModuleType) -> None:
    gaps = sim.gap(sim.Simulation(24.0, sim.Device())).figures()
    assert gaps["gap_p99"] <= 25
    assert gaps["gap_max"] <= 40
    assert gaps["ttft_mean"] <= 1.5 * 213


def test_a_crowd_of_prompts_is_done_nearly_as_soon_as_without_a_bound(sim: ModuleType) -> None:
    free, bounded = (sim.agent64(sim.Simulation(bound_ms, sim.Device())).figures() for bound_ms in (0.0, 24.0))
    assert bounded["total_s"] <= 1.04 * free["total_s"]
    assert bounded["ttft_mean"] <= free["ttft_mean"]


@pytest.mark.parametrize("times", [0.6, 1.3, 2.0])
def test_what_steps_beyond_the_captured_sizes_cost_says_nothing_of_those_within(sim: ModuleType, times: float) -> None:
    """The crowd of 32 prompts that begins with them is computed in such steps; the lone prompts afterwards keep the bound all the same."""

    class Uneven(sim.Device):  # type: ignore[misc, name-defined]
        def step_ms(self, plan: object, rng: object) -> float:
            tokens = int(plan.query_lens[: plan.num_extend_rows].sum())  # type: ignore[attr-defined]
            return float(super().step_ms(plan, rng)) * (times if tokens > self.sizes[-1] else 1.0)

    for seed in range(3):
        simulation = sim.Simulation(24.0, Uneven(), seed)
        sim.gap(simulation, arrivals=3)
        beside = [ms for tokens, rows, ms in simulation.steps if tokens and rows == 32]
        assert len(beside) > 30
        assert max(beside) < 27

"""How `max_step_ms` divides an H200 between decodes and prompts: the scheduler itself, on a device that is a formula, in a few seconds and without a device.

    python benchmarks/step_bound_sim.py [--bounds 0,21,24] [--loads gap,agent64,bursts] [--noise 0.02] [--json]

For each bound and load: the seconds until all is done, the gaps between the tokens of a request, and the time to the first token of the prompts that arrive.
The loop is the engine's with overlap: plan N + 1 is made while N runs. The formula's constants are fitted to what `docs/acceptance/gpu.md` records (section 1):
Qwen3-8B's shape, one H200. A device that is not a formula differs from it; what is compared here are rules.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenspeed import _scheduler as ts
from tokenspeed.runtime.mixed_graphs import EXTEND_ROWS, mixed_sizes

__all__ = ["LOADS", "Device", "Report", "Simulation"]

PAGE = 64


@dataclass(frozen=True)
class Device:
    """Milliseconds of a step: weights read once, then each part by itself."""

    weights_ms: float = 4.0
    row_us: float = 12.0  # a decode row's products, norms and draw
    token_us: float = 21.6  # a prompt token's products, norms and activations
    pair_ns: float = 1.0  # a prompt token and one that it attends to
    read_ns: float = 38.8  # a cached token that a decode row reads
    shared_reads: float = 6.0  # shared pages are read once, and the kernel takes as long as for so many times
    sizes: tuple[int, ...] = mixed_sizes(256, 8192)[0]  # prompt tokens that captured steps are filled up to
    noise: float = 0.02  # standard deviation, of the whole

    def step_ms(self, plan: ts.ExecutionPlan, rng: random.Random) -> float:
        extends = plan.num_extend_rows
        queries, contexts = plan.query_lens.astype(np.float64), plan.context_lens.astype(np.float64)
        tokens = queries[:extends].sum()
        pairs = (queries[:extends] * (contexts[:extends] + queries[:extends] / 2)).sum()
        read = contexts[extends:].sum()
        rows = len(queries) - extends
        for begin, end, _, pages in plan.prefix_intervals.tolist():
            read -= (end - begin - self.shared_reads) * pages * PAGE
        if rows and 0 < extends <= EXTEND_ROWS and tokens <= self.sizes[-1]:
            tokens = next(size for size in self.sizes if size >= tokens)
        products = self.weights_ms + (self.row_us * rows + self.token_us * tokens) / 1e3
        attention = (self.pair_ns * pairs + self.read_ns * read) / 1e6
        return float((products + attention) * (1.0 + self.noise * rng.gauss(0.0, 1.0)))


@dataclass
class Report:
    """What a load came to; milliseconds but for the whole."""

    total_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        return {
            "total_s": self.total_s,
            "gap_mean": statistics.fmean(self.gaps),
            "gap_p99": float(np.percentile(self.gaps, 99)),
            "gap_max": max(self.gaps),
            "ttft_mean": statistics.fmean(self.ttfts) if self.ttfts else 0.0,
        }


class Simulation:
    """One scheduler, one device, a clock that only they move."""

    def __init__(self, bound_ms: float, device: Device, seed: int = 0) -> None:
        group = ts.CacheGroupConfig(page_size=PAGE, num_pages=12_000)
        self.scheduler = ts.Scheduler(
            ts.SchedulerConfig(
                groups=[group],
                max_num_seqs=256,
                max_batched_tokens=8192,
                max_model_len=40_000,
                overlap_depth=1,
                max_step_us=int(bound_ms * 1e3),
                step_sizes=device.sizes,
            )
        )
        self.device, self.random = device, random.Random(seed)
        self.now = self.ended = self.free = 0.0  # milliseconds: now, the last result, the device's last queued step
        self.flights: list[tuple[int, list[int], list[int], float, float]] = []
        self.next_id = 0
        self.asked: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.steps: list[tuple[int, int, float]] = []
        self.report = Report()
        self.watched: set[int] = set()  # whose first tokens are reported

    def tokens(self, count: int) -> list[int]:
        return np.random.default_rng(self.random.getrandbits(32)).integers(0, 150_000, count).tolist()

    def submit(self, tokens: list[int], output: int, watch: bool = True) -> int:
        self.next_id += 1
        (result,) = self.scheduler.submit_requests(
            [ts.RequestSpec(id=self.next_id, tokens=tokens, max_new_tokens=output)], int(self.now * 1e3)
        )
        assert result.accepted, result.reason
        self.asked[self.next_id] = self.now
        if watch:
            self.watched.add(self.next_id)
        return self.next_id

    def step(self) -> bool:
        """One turn of the engine's loop; false where nothing ran."""
        plan = self.scheduler.next_execution_plan(int(self.now * 1e3))
        rows = plan.num_rows
        if rows:
            samples = [int(flag & ts.RowFlags.SAMPLES != 0) for flag in plan.flags.tolist()]
            took = self.device.step_ms(plan, self.random)
            prompt_tokens = int(plan.query_lens[: plan.num_extend_rows].sum())
            self.steps.append((prompt_tokens, rows - plan.num_extend_rows, took))
            self.free = max(self.free, self.now) + took
            self.flights.append((plan.plan_id, plan.request_ids.tolist(), samples, self.now, self.free))
        if not self.flights:
            return False
        if not rows or len(self.flights) > 1:
            self._advance()
        return True

    def _advance(self) -> None:
        plan_id, ids, samples, began, ends = self.flights.pop(0)
        self.now = max(self.now, ends)
        step_us = int((self.now - max(began, self.ended)) * 1e3)
        self.ended = self.now
        counts = np.array(samples, np.int32)
        self.scheduler.advance(
            plan_id, counts, np.full((len(ids), 1), 7, np.int32), np.zeros(len(ids), np.int32), step_us
        )
        for request in (number for number, sampled in zip(ids, samples, strict=True) if sampled):
            if request in self.last:
                self.report.gaps.append(self.now - self.last[request])
            elif request in self.watched:
                self.report.ttfts.append(self.now - self.asked[request])
            self.last[request] = self.now

    def run(
        self, arrivals: Sequence[tuple[float, list[list[int]], int]] = (), until: Callable[[], bool] | None = None
    ) -> None:
        """Runs to the end or ``until``; ``arrivals`` are (milliseconds from now, prompts, output tokens), in order."""
        due, began = list(arrivals), self.now
        while until is None or not until():
            while due and self.now - began >= due[0][0]:
                _, prompts, output = due.pop(0)
                for prompt in prompts:
                    self.submit(prompt, output)
            if self.step():
                continue
            if not due:
                return
            self.now = began + due[0][0]

    def decodes(self, count: int, context: int, output: int) -> None:
        """So many requests that decode on and on; what came before is forgotten."""
        for _ in range(count):
            self.submit(self.tokens(context), output, watch=False)
        steady = len(self.steps) + 100
        self.run(until=lambda: len(self.last) >= count and len(self.steps) >= steady)
        self.report, self.steps = Report(), []


def gap(simulation: Simulation, arrivals: int = 10) -> Report:
    """32 decodes, and a prompt of 8,192 tokens each second."""
    prompts = [(1e3 * second, [simulation.tokens(8192)], 1) for second in range(arrivals)]
    simulation.decodes(32, 1024, 4000)
    began = simulation.now
    simulation.run(prompts, until=lambda: len(simulation.report.ttfts) == len(prompts))
    simulation.report.total_s = (simulation.now - began) / 1e3
    return simulation.report


def agent64(simulation: Simulation, requests: int = 64) -> Report:
    """64 requests at once: 8,192 tokens shared and in the cache, 512 of their own, 128 new."""
    shared = simulation.tokens(8192)
    simulation.submit([*shared, *simulation.tokens(16)], 1)
    simulation.run()
    for _ in range(2):  # the second time it knows the device
        simulation.report, simulation.last, simulation.steps, began = Report(), {}, [], simulation.now
        simulation.run([(0.0, [shared + simulation.tokens(512) for _ in range(requests)], 128)])
    simulation.report.total_s = (simulation.now - began) / 1e3
    return simulation.report


def bursts(simulation: Simulation) -> Report:
    """32 decodes, and twice a second a burst of 1 to 16 prompts of 500 to 3,000 tokens, 64 new tokens each."""
    draw = random.Random(7)
    arrivals = [
        (500.0 * i, [simulation.tokens(draw.randint(500, 3000)) for _ in range(draw.choice((1, 1, 2, 4, 8, 16)))], 64)
        for i in range(20)
    ]
    prompts = sum(len(burst) for _, burst, _ in arrivals)
    simulation.decodes(32, 1024, 4000)
    began = simulation.now
    simulation.run(arrivals, until=lambda: len(simulation.report.ttfts) == prompts)
    simulation.report.total_s = (simulation.now - began) / 1e3
    return simulation.report


LOADS: dict[str, Callable[[Simulation], Report]] = {"gap": gap, "agent64": agent64, "bursts": bursts}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--bounds", default="0,18.5,21,24,25", help="values of max_step_ms")
    p.add_argument("--loads", default=",".join(LOADS), help=f"of {', '.join(LOADS)}")
    p.add_argument("--noise", type=float, default=Device.noise, help="of a step's time, standard deviation over mean")
    p.add_argument("--json", action="store_true", help="one JSON object a line")
    a = p.parse_args()
    for load in a.loads.split(","):
        for bound in (float(text) for text in a.bounds.split(",")):
            figures = LOADS[load](Simulation(bound, Device(noise=a.noise))).figures()
            if a.json:
                print(
                    json.dumps(
                        {"load": load, "max_step_ms": bound}
                        | {name: round(value, 2) for name, value in figures.items()}
                    )
                )
            else:
                print(
                    f"{load:8} max_step_ms {bound:5.1f}  "
                    + "  ".join(f"{name} {value:8.2f}" for name, value in figures.items())
                )


if __name__ == "__main__":
    main()

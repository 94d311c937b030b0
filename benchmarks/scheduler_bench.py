"""Times the scheduler through its Python face: a plan, its arrays read, the arrays for advance made, and advance.

``python benchmarks/scheduler_bench.py [--json] [--upstream] [--tiers] [--plans 5000] [--runs 5] [--only PATTERN]``

Each row is the best of several runs (by the sum of its two medians): on a shared machine the others measure the neighbours. A
plan's time holds the call and the reading of every array; ``events_us`` is the making of the arrays for advance. With ``--tiers``
there are a host tier that everything is written through to and a store below it, every transfer is answered before the advance of its
step, and ``cache_us`` is the time of those answers, over the steps that had any.

Every run of a row makes the same plans, so two more figures tell where its slow ones come from: ``p999_runs``, each run's p99.9, of which
the best stands as ``p999``; and ``own``, the percentiles of each step's least time over the runs. A step that is slow by what it does is slow in every
run and stays in ``own``; an interruption strikes another step each time and does not. The row ``nothing`` is the yardstick for both: loops
that do nothing for about as long as the steps of 160 decodes take, timed the same way.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenspeed import _scheduler as ts

PAGE = 64
ARRAYS = (
    "request_ids",
    "slots",
    "context_lens",
    "query_lens",
    "input_ids",
    "flags",
    "output_lens",
    "delta_group",
    "delta_slot",
    "delta_index",
    "delta_page",
    "prefix_intervals",
    "retracted_ids",
    "finished_ids",
    "finished_reasons",
)
KINDS = ("write_back", "load_back", "lookup", "prefetch", "store")
TRANSFERS = (
    *(f"{kind}_{name}" for kind in KINDS for name in ("op", "group")),
    "write_back_device",
    "write_back_host",
    "load_back_host",
    "load_back_device",
    "load_back_row",
    "lookup_hash",
    "prefetch_host",
    "prefetch_hash",
    "store_host",
    "store_hash",
)
Result = dict[str, Any]
Tokens = npt.NDArray[np.int32]


class Driver:
    """A scheduler and the smallest engine around it; keeps the times of its last steps."""

    tiers = False  # set once, from the command line

    def __init__(self, pages: int, rows: int, budget: int = 8192, **config: Any) -> None:
        if self.tiers:
            config |= {"l3": True, "prefetch_threshold": 1 << 30}  # every page is stored; none is asked for
        self.arrays = ARRAYS + TRANSFERS if self.tiers else ARRAYS
        self.scheduler = ts.Scheduler(
            ts.SchedulerConfig(
                groups=[ts.CacheGroupConfig(page_size=PAGE, num_pages=pages, host_pages=pages if self.tiers else 0)],
                max_num_seqs=rows,
                max_batched_tokens=budget,
                max_model_len=1 << 20,
                **config,
            )
        )
        self.now = 0
        self.next_id = 0
        self.context = 0  # of the last row of the last step
        self.plan_ns: list[int] = []
        self.events_ns: list[int] = []
        self.advance_ns: list[int] = []
        self.cache_ns: list[int] = []

    def submit(self, tokens: Tokens, new: int = 1 << 20) -> int:
        self.next_id += 1
        spec = ts.RequestSpec(id=self.next_id, tokens=tokens.astype(np.int32), max_new_tokens=new)
        (result,) = self.scheduler.submit_requests([spec], self.now)
        if not result.accepted:
            raise SystemExit(result.reason)
        return self.next_id

    def step(self) -> int:
        """One plan, answered; the number of its rows."""
        self.now += 1000
        clock = time.perf_counter_ns
        start = clock()
        plan = self.scheduler.next_execution_plan(self.now)
        for name in self.arrays:
            getattr(plan, name)
        planned = clock()
        if self.tiers and plan.num_transfers:
            self.answer(plan)
        rows = plan.num_rows
        if rows == 0:
            self.plan_ns.append(planned - start)
            return 0
        flags = plan.flags
        self.context = int(plan.context_lens[-1])
        made = clock()
        counts = flags & 1
        tokens = np.full(rows, 7, np.int32)
        outcomes = np.zeros(rows, np.int32)
        ready = clock()
        self.scheduler.advance(plan.plan_id, counts, tokens, outcomes, 0)
        end = clock()
        self.plan_ns.append(planned - start)
        self.events_ns.append(ready - made)
        self.advance_ns.append(end - ready)
        return rows

    def answer(self, plan: ts.ExecutionPlan) -> None:
        """Every transfer of the plan has brought all its pages."""
        ops, pages = np.unique(np.concatenate([getattr(plan, f"{kind}_op") for kind in KINDS]), return_counts=True)
        counts = pages.astype(np.int32)
        start = time.perf_counter_ns()
        self.scheduler.cache_done(ops, counts)
        self.cache_ns.append(time.perf_counter_ns() - start)

    def forget(self) -> None:
        self.cache_ns.clear()
        self.plan_ns.clear()
        self.events_ns.clear()
        self.advance_ns.clear()

    def settle(self) -> None:
        """Runs until every admitted prompt is decoding."""
        while self.scheduler.stats().running < self.next_id or self.step() != self.next_id:
            self.step()


def percentiles(nanoseconds: list[int]) -> Result:
    values = np.array(nanoseconds, dtype=np.float64) / 1000
    return {
        "p50": round(float(np.percentile(values, 50)), 2),
        "p99": round(float(np.percentile(values, 99)), 2),
        "p999": round(float(np.percentile(values, 99.9)), 2),
        "max": round(float(values.max()), 2),
    }


def summary(driver: Driver) -> Result:
    return {name: percentiles(values) for name, values in times(driver).items()}


def times(driver: Driver) -> dict[str, list[int]]:
    result = {"plan_us": driver.plan_ns, "events_us": driver.events_ns, "advance_us": driver.advance_ns}
    return result | {"cache_us": driver.cache_ns} if driver.cache_ns else result


def best_of(drivers: list[Driver]) -> Result:
    """The figures of the best of several runs of the same steps; see the head of this file."""
    results = [summary(driver) for driver in drivers]
    best = min(results, key=lambda result: float(result["plan_us"]["p50"] + result["advance_us"]["p50"]))
    for name in best:
        runs = [result[name]["p999"] for result in results]
        least = np.min([times(driver)[name] for driver in drivers], axis=0)
        best[name] = {**best[name], "p999": min(runs), "p999_runs": runs, "own": percentiles(least.tolist())}
    return best


def prompt(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 150_000, length, dtype=np.int32)


def repeat(runs: int, run: Callable[[], Driver]) -> list[Driver]:
    """The drivers of several runs, less their schedulers: only the times are needed, and one scheduler's memory at a time."""
    drivers = []
    for _ in range(runs):
        gc.collect()
        gc.disable()
        driver = run()
        driver.__dict__.pop("scheduler", None)
        drivers.append(driver)
        gc.enable()
    return drivers


def best(runs: int, run: Callable[[], Result]) -> Result:
    results = []
    for _ in range(runs):
        gc.collect()
        gc.disable()
        results.append(run())
        gc.enable()
    return min(results, key=lambda result: float(result["plan_us"]["p50"] + result["advance_us"]["p50"]))


def decoding(rows: int, context: int, plans: int, shared: int = 0) -> Driver:
    """``rows`` requests in decode; their page borders are spread evenly, as they are under traffic."""
    driver = Driver(rows * ((context + 2 * plans) // PAGE + 8) + 64, rows)
    common = prompt(1, shared)
    for row in range(rows):
        driver.submit(np.concatenate([common, prompt(row + 2, context - shared + row * PAGE // rows)]))
    driver.settle()
    driver.forget()
    return driver


def decode_row(rows: int, context: int, plans: int, shared: int = 0) -> Driver:
    driver = decoding(rows, context, plans, shared)
    for _ in range(plans):
        driver.step()
    return driver


def nothing_row(plans: int) -> Driver:
    """Loops of 8, 2 and 5 us that touch no memory: what is slow in here is the machine."""
    driver = Driver(64, 1)
    clock = time.perf_counter_ns

    def turns(microseconds: float) -> range:
        times = []
        for _ in range(100):
            start = clock()
            for _ in range(1000):
                pass
            times.append(clock() - start)
        return range(int(microseconds * 1e6 / min(times)))

    plan, events, advance = turns(8), turns(2), turns(5)
    for _ in range(plans):
        start = clock()
        for _ in plan:
            pass
        planned = clock()
        for _ in events:
            pass
        ready = clock()
        for _ in advance:
            pass
        driver.advance_ns.append(clock() - ready)
        driver.events_ns.append(ready - planned)
        driver.plan_ns.append(planned - start)
    return driver


def crossing_row(rows: int, context: int, plans: int) -> Driver:
    """Only the steps in which every row takes a new page; the advance before each publishes every row's full page."""
    # One step takes all prompts, so that all rows stand at the same place in their pages.
    driver = Driver(rows * ((context + 2 * plans) // PAGE + 8) + 64, rows, budget=rows * context)
    for row in range(rows):
        driver.submit(prompt(row + 2, context))
    driver.settle()
    keep = Driver.__new__(Driver)
    keep.plan_ns, keep.events_ns, keep.advance_ns, keep.cache_ns = [], [], [], []
    for _ in range(plans):
        driver.forget()
        driver.step()
        if driver.context % PAGE == 0:  # every row took a page for its next token
            keep.plan_ns += driver.plan_ns
            keep.events_ns += driver.events_ns
        elif driver.context % PAGE == PAGE - 1:  # every row filled its page
            keep.advance_ns += driver.advance_ns
    return keep


def waiting_row(waiting: int, context: int, plans: int) -> Result:
    """64 decodes, and ``waiting`` prompts that are not admitted because the outputs of those may need the pages.

    This is the costliest way to be refused: each plan looks at the whole window and adds up what every row may still take. The
    same steps without the waiting prompts are timed in between, in blocks, so that both see the same machine.
    """
    rows, block = 64, 250
    driver = Driver(
        rows * ((context + 4 * plans + 1000) // PAGE + 4) + 2048, rows + 8, admission=ts.AdmissionRule.WHOLE_OUTPUT
    )
    for row in range(rows):
        driver.submit(prompt(row + 2, context + row * PAGE // rows), new=4 * plans + 1000)
        driver.step()
    driver.settle()
    prompts = [prompt(1000 + extra, context) for extra in range(waiting)]
    alone, beside = Driver.__new__(Driver), Driver.__new__(Driver)
    for kept in (alone, beside):
        kept.plan_ns, kept.events_ns, kept.advance_ns, kept.cache_ns = [], [], [], []
    for _ in range(max(1, plans // block)):
        for kept, extra in ((alone, 0), (beside, waiting)):
            ids = [driver.submit(prompts[i], new=400_000) for i in range(extra)]
            driver.step()
            if driver.scheduler.stats().waiting != extra:
                raise SystemExit(f"of {extra} prompts that should wait, {driver.scheduler.stats().waiting} do")
            driver.forget()
            for _ in range(block):
                driver.step()
            kept.plan_ns += driver.plan_ns
            kept.events_ns += driver.events_ns
            kept.advance_ns += driver.advance_ns
            for request in ids:
                driver.scheduler.abort(request)
            driver.step()
    result = summary(beside)
    result["added_us"] = round(result["plan_us"]["p50"] - summary(alone)["plan_us"]["p50"], 2)
    return result


def evict_row(pages: int, repeats: int) -> Result:
    """A pool full of cached prompts; each 8k prompt is admitted by evicting 128 pages."""
    length = 8192
    driver = Driver(pages, 4)
    seed = 0
    while driver.scheduler.stats().pages_free[0] >= length // PAGE + 1:
        seed += 1
        driver.submit(prompt(seed, length), new=1)
        while driver.scheduler.has_work():
            driver.step()
    times = []
    for _ in range(repeats):
        seed += 1
        driver.submit(prompt(seed, length), new=1)
        driver.forget()
        driver.step()
        times.append(driver.plan_ns[0])
        while driver.scheduler.has_work():
            driver.step()
    if driver.scheduler.stats().evicted_pages < repeats * 100:
        raise SystemExit("the prompts were not admitted by eviction")
    return {"ms": round(float(np.median(times)) / 1e6, 4), "max_ms": round(max(times) / 1e6, 4)}


def scenarios(plans: int, runs: int) -> Iterator[tuple[str, Callable[[], Result]]]:
    context = 50_000

    def row(run: Callable[..., Driver], *arguments: int) -> Callable[[], Result]:
        return lambda: best_of(repeat(runs, lambda: run(*arguments)))

    def evict(pages: int) -> Callable[[], Result]:
        return lambda: min((evict_row(pages, 50) for _ in range(min(runs, 3))), key=lambda result: float(result["ms"]))

    yield "nothing", row(nothing_row, plans)
    for rows in (16, 64, 160):
        yield f"decode_{rows}x50k", row(decode_row, rows, context, plans)
    yield "decode_160x50k_all_cross", row(crossing_row, 160, context, min(plans, 1280))
    yield "decode_160x50k_shared_40k", row(decode_row, 160, context, plans, 40_000)
    for waiting in (16, 64, 128):
        yield f"waiting_{waiting}x50k", lambda count=waiting: best(runs, lambda: waiting_row(count, context, plans))
    for pages in (4096, 65_536, 262_144):
        yield f"evict_admit_8k_{pages}", evict(pages)
    for rows in (64, 256, 1024):
        yield f"short_{rows}", row(decode_row, rows, 512, min(plans, 1000), 256)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plans", type=int, default=5000, help="plans in a run")
    parser.add_argument("--runs", type=int, default=5, help="runs of which the best counts")
    parser.add_argument("--only", default="*", help="scenarios whose name fits this pattern")
    parser.add_argument("--tiers", action="store_true", help="with a host tier and a store below it")
    parser.add_argument(
        "--upstream", action="store_true", help="also time tokenspeed-scheduler==0.1.42, where it is installed"
    )
    options = parser.parse_args()
    Driver.tiers = options.tiers
    report: Result = {}
    for name, run in scenarios(options.plans, options.runs):
        if not fnmatch.fnmatch(name, options.only):
            continue
        report[name] = run()
        if not options.json:
            print(f"{name:28} {json.dumps(report[name])}", flush=True)
    if options.upstream:
        from scheduler_upstream import measure  # beside this file; its package is optional

        report["upstream"] = measure(options.plans, options.runs)
        if not options.json:
            print(json.dumps(report["upstream"], indent=1))
    if options.json:
        print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

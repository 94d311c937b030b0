"""Times ``tokenspeed-scheduler==0.1.42`` doing the decode steps of ``scheduler_bench.py``.

``pip install --no-deps tokenspeed-scheduler==0.1.42`` (for this comparison only). Its events are made in Python one by one, and its
tables are read as arrays; both are timed like their counterparts.
"""

from __future__ import annotations

import gc
import importlib
import time
from typing import Any

import numpy as np

__all__ = ["measure"]

PAGE = 64


def _decode(package: Any, rows: int, context: int, plans: int) -> dict[str, Any]:
    ext = package._ext
    pages = rows * ((context + 2 * plans) // PAGE + 8) + 64
    config = ext.SchedulerConfig()
    config.cache_groups = [ext.CacheGroupConfig("full", PAGE, pages, ext.AttnKind.Full)]
    config.num_device_pages = pages
    config.prefix_granularity = PAGE
    config.max_batch_size = rows
    config.max_scheduled_tokens = 8192
    config.disable_l2_cache = True
    config.num_snapshot_pages = 1  # the null page alone: it never retracts
    config.num_host_pages = 1
    scheduler = ext.Scheduler(config)
    for row in range(rows):
        spec = ext.RequestSpec()
        spec.request_id = str(row)
        spec.tokens = np.random.default_rng(row + 2).integers(0, 150_000, context + row * PAGE // rows).tolist()
        spec.max_new_tokens = plans + 64
        scheduler.submit_requests([spec])
    times: dict[str, list[int]] = {"plan_us": [], "events_us": [], "advance_us": []}
    clock = time.perf_counter_ns
    for _ in range(plans + rows * (context // 8192 + 2)):
        start = clock()
        plan = scheduler.next_execution_plan()
        batches = plan.forward
        for batch in batches:
            batch.request_pool_indices, batch.input_lengths, batch.decode_input_ids  # noqa: B018
            batch.block_tables_arrays()
        planned = clock()
        if not batches:
            break
        batch = batches[0]
        ids, extends = batch.request_ids, batch.num_extends()
        done = [int(p) + int(n) for p, n in zip(batch.extend_prefix_lens, batch.input_lengths, strict=False)]
        lengths = list(batch.prefill_lengths)
        made = clock()
        event = ext.ExecutionEvent()
        for i, request in enumerate(ids):
            result = ext.ForwardEvent.ExtendResult()
            result.request_id = request
            result.tokens = [7] if i >= extends or done[i] >= lengths[i] else []
            event.add_event(result)
        ready = clock()
        scheduler.advance(event)
        end = clock()
        if extends == 0 and len(ids) == rows:
            times["plan_us"].append(planned - start)
            times["events_us"].append(ready - made)
            times["advance_us"].append(end - ready)
            if len(times["plan_us"]) == plans:
                break
    if not times["plan_us"]:
        return {"error": f"never decoded {rows} rows together"}
    return {name: {"p50": round(float(np.median(values)) / 1000, 2)} for name, values in times.items()}


def measure(plans: int, runs: int) -> dict[str, Any]:
    """The same decode rows, by scenario name; an ``error`` where the package is not there or another version."""
    try:
        package = importlib.import_module("tokenspeed_scheduler")
    except ImportError:
        return {"error": "pip install --no-deps tokenspeed-scheduler==0.1.42"}
    plans = min(plans, 100)  # a plan takes milliseconds
    report: dict[str, Any] = {}
    for name, rows, context in (
        ("decode_16x50k", 16, 50_000),
        ("decode_64x50k", 64, 50_000),
        ("decode_160x50k", 160, 50_000),
        ("short_64", 64, 512),
        ("short_256", 256, 512),
    ):
        results = []
        for _ in range(min(runs, 2)):
            gc.collect()
            results.append(_decode(package, rows, context, plans))
        report[name] = min(results, key=lambda result: result.get("plan_us", {"p50": float("inf")})["p50"])
    return report

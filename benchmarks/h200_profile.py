"""Where the device's time of a step goes: the rows of ``h200.py`` that miss their figures, by kind of kernel.

    python benchmarks/h200_profile.py [--only decode,agent64,prefill] [--json FILE] [--commit HASH] [--names 6]

Device times of the kernels of a step (sum, ms) stand beside the wall time of steps timed before without the profiler; what is left of it ("between")
is time in which no kernel ran. ``--names`` prints the longest kernels of each row.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from typing import Any

import torch
from h200 import Bench, commit_here, save
from torch.profiler import ProfilerActivity, profile

#: The first that matches a kernel's name is its kind.
KINDS = (
    ("attention", re.compile(r"attend|decode_|merge_|extend|prefill|flash|shared_", re.I)),
    ("products", re.compile(r"gemm|gemv|nvjet|cutlass|matmul|small_m|persistent|split_k|linear|cublas", re.I)),
    ("norms, rotations, activations", re.compile(r"norm|rope|rotate|silu|swiglu|gelu|act", re.I)),
    ("sampling", re.compile(r"argmax|draw|sampl|softmax|topk|reduce", re.I)),
    ("copies and gathers", re.compile(r"memcpy|memset|copy|gather|index|embed|cat|scatter|fill", re.I)),
)


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if pattern.search(name)), "other")


class Profiles:
    """The rows, each printed as soon as it is there."""

    def __init__(self, names: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self.names = names

    def add(self, row: str, wall_ms: float, run: Callable[[], None], steps: int) -> None:
        """Profile ``run``, which makes ``steps`` steps of ``wall_ms`` each."""
        with profile(activities=[ProfilerActivity.CUDA]) as record:
            run()
            torch.cuda.synchronize()
        kinds: dict[str, float] = {}
        longest = []
        for event in record.key_averages():
            took = event.self_device_time_total / steps / 1e3
            if took > 0:
                kinds[kind_of(event.key)] = kinds.get(kind_of(event.key), 0.0) + took
                longest.append((took, event.count / steps, event.key))
        between = wall_ms - sum(kinds.values())
        shares = dict(sorted(kinds.items(), key=lambda item: -item[1])) | {"between": between}
        self.rows.append(
            {"row": row, "wall_ms": round(wall_ms, 3), **{kind: round(ms, 3) for kind, ms in shares.items()}}
        )
        print(f"{row}: {wall_ms:.2f} ms = " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in shares.items()), flush=True)
        for took, count, name in sorted(longest, reverse=True)[: self.names]:
            print(f"    {took * 1e3:9.1f} us, {count:6.1f} of {name[:110]}", flush=True)


def decode(bench: Bench, profiles: Profiles, row: str, prompts: list[list[int]]) -> None:
    """Steady steps of as many rows as there are prompts."""
    engine = bench.engine
    bench.time(prompts[:1], 1)
    wanted = {engine.add_request(prompt, bench.greedy(400)) for prompt in prompts}
    seen: set[int] = set()
    while seen != wanted:
        seen |= {item.rid for item in engine.step() if item.tokens}
    for _ in range(30):
        engine.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(40):
        engine.step()
    torch.cuda.synchronize()
    wall_ms = (time.perf_counter() - began) / 40 * 1e3

    def steps() -> None:
        for _ in range(6):
            engine.step()

    profiles.add(row, wall_ms, steps, 6)
    for rid in wanted:
        engine.abort(rid)
    while engine.busy:
        engine.step()


def prefill(bench: Bench, profiles: Profiles, tokens: int) -> None:
    wall_ms = bench.ttft(tokens, 3)

    def once() -> None:
        bench.time([bench.prompt(tokens)], 1)

    profiles.add(f"prompt of {tokens}", wall_ms, once, 1)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--only", default="decode,agent64,prefill")
    p.add_argument("--json", help="file to write the figures to")
    p.add_argument("--commit", default=commit_here(), help="noted with the figures (default: this tree's)")
    p.add_argument("--names", type=int, default=0, help="longest kernels to print for each row")
    a = p.parse_args()
    parts = a.only.split(",")
    bench, profiles = Bench({"max_step_ms": 24.0}), Profiles(a.names)
    if "decode" in parts:
        for batch in (1, 8, 64, 128, 256):
            prompts = [bench.prompt(1025) for _ in range(batch)]
            decode(bench, profiles, f"{batch} rows of 1.1k", prompts)
    if "agent64" in parts:
        shared = bench.prompt(8192)
        decode(
            bench,
            profiles,
            "64 rows of 8,192 shared and 512 own",
            [shared + bench.prompt(512) for _ in range(64)],
        )
    if "prefill" in parts:
        for tokens in (8192, 32768):
            prefill(bench, profiles, tokens)
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    save(a.json, {"date": date, "commit": a.commit, "device": bench.engine.info.device, "rows": profiles.rows})
    print(json.dumps({"rows": len(profiles.rows)}), flush=True)


if __name__ == "__main__":
    main()

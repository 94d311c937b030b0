"""Searches tile shapes of the small-m products on the present device and prints TB/s beside the vendor's library.

    python plugins/kernels/triton/bench/bench_gemm.py [--m 1 8 32] [--out FILE]

Each configuration is timed in a captured graph over distinct weights, many times what the L2 cache holds. Everything is compiled before, by as many processes
as there are processors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import triton
from tokenspeed_plugin_kernels_triton.activation import silu_and_mul
from tokenspeed_plugin_kernels_triton.gemm import SmallGemm
from tokenspeed_plugin_kernels_triton.tuning import GemmConfig

#: name: rows of the weight, columns, whether it is a gate-up weight with its activation
SHAPES = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "down": (4096, 12288, False),
    "gate_up": (24576, 4096, True),
    "head": (151936, 4096, False),
}


def graph_time(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Microseconds a call of a captured graph of ``calls``: the median."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[1:])


def one_row() -> Iterator[GemmConfig]:
    for bn, bk, warps in itertools.product((1, 2, 4, 8, 16, 32), (256, 512, 1024, 2048, 4096), (1, 2, 4, 8)):
        each = bn * bk // (32 * warps)
        if bk // (32 * warps) < 8 or not 16 <= each <= 128:
            continue
        if each >= 32:
            yield GemmConfig(1, bn, bk, 1, warps, 1)
            if bk < 4096 and bn * bk <= 16384:
                yield GemmConfig(1, bn, bk, 1, warps, 4)
        if bk < 4096 and each <= 64:
            yield GemmConfig(1, bn, bk, 1, warps, 1, ahead=1)
    for bn, warps, programs in itertools.product((1, 2, 4), (2, 4, 8), (1, 2, 3, 4, 6, 8)):
        if 16 <= bn * 4096 // (32 * warps) <= 128 and warps * programs >= 8 and warps * programs <= 32:
            yield GemmConfig(1, bn, 4096, 1, warps, 1, programs=programs)


def few_rows(bm: int) -> Iterator[GemmConfig]:
    for bn, bk, split, stages, ahead in itertools.product((32, 64, 128), (64, 128, 256), (1, 2, 4), (3, 4, 6), (0, 3)):
        if (bn + bm) * bk * 2 * stages <= 200_000 and bn * bk * stages >= 24576 and bn * bk <= 16384:
            yield GemmConfig(bm, bn, bk, split, 4, stages, ahead=ahead)


def fits(cfg: GemmConfig, n: int, k: int, gated: bool) -> bool:
    rows = n // 2 if gated else n
    if gated and (cfg.split_k > 1 or cfg.bn * cfg.bk // (32 * cfg.warps) > 64):
        return False
    if cfg.programs and k > 4096:
        return False
    return k % (cfg.bk * cfg.split_k) == 0 and rows % cfg.bn == 0 and not (n > 20000 and cfg.split_k > 1)


def candidates(m: int) -> list[tuple[str, GemmConfig]]:
    """(shape, configuration) for ``m`` rows."""
    some = list(one_row()) + list(few_rows(16)) if m == 1 else list(few_rows(16 if m <= 16 else 32))
    return [
        (name, cfg)
        for name, (n, k, gated) in SHAPES.items()
        for cfg in some
        if fits(cfg, n, k, gated and cfg.bm == 1) and not (n > 100000 and (cfg.bm > 1) and m == 1)
    ]


def reference(x: torch.Tensor, w: torch.Tensor, gated: bool) -> torch.Tensor:
    product = torch.nn.functional.linear(x, w)
    return silu_and_mul(product) if gated else product


def run_of(gemm: SmallGemm, name: str, cfg: GemmConfig, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    gated = SHAPES[name][2]
    if gated and cfg.bm > 1:
        return lambda w: silu_and_mul(gemm(x, w, config=cfg))
    return lambda w: gemm(x, w, config=cfg, gated=gated)


def prepare(part: int, parts: int, rows: Sequence[int], wrong: str) -> None:
    """Compile a share of the candidates and compare each with the library; what fails is listed in the file ``wrong``."""
    gemm, generator = SmallGemm(torch.device("cuda")), torch.Generator("cuda").manual_seed(0)
    failed = []
    for m in rows:
        weights: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for number, (name, cfg) in enumerate(candidates(m)):
            if hash((cfg, SHAPES[name][2] and cfg.bm == 1)) % parts != part:
                continue
            if name not in weights:
                n, k, gated = SHAPES[name]
                w = torch.randn(n, k, dtype=torch.bfloat16, device="cuda", generator=generator) * 0.02
                x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda", generator=generator)
                weights = {name: (x, w, reference(x, w, gated))}
            x, w, wanted = weights[name]
            try:
                torch.testing.assert_close(run_of(gemm, name, cfg, x)(w), wanted, atol=3e-2, rtol=3e-2)
            except Exception as error:  # a configuration that needs too much of something is not a candidate
                failed.append((m, number, f"{name} {cfg}: {type(error).__name__} {str(error)[:200]}"))
    Path(f"{wrong}.{part}").write_text(json.dumps(failed))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--m", type=int, nargs="*", default=[1, 8, 32])
    p.add_argument(
        "--out", help="file to write: put it into src/tokenspeed_plugin_kernels_triton/tuned by the device's name"
    )
    p.add_argument("--seconds", type=float, default=240, help="of timing; what is left over is not timed")
    a = p.parse_args()
    began = time.time()
    parts = os.cpu_count() or 1
    wrong = f"/tmp/bench_gemm.{os.getpid()}"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=prepare, args=(part, parts, a.m, wrong)) for part in range(parts)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    failed = {}
    for part in range(parts):
        file = Path(f"{wrong}.{part}")
        failed |= {(m, number): why for m, number, why in json.loads(file.read_text())} if file.exists() else {}
    print(
        f"compiled in {time.time() - began:.1f} s, {len(failed)} fail", *list(failed.values())[:6], sep="\n", flush=True
    )
    began = time.time()
    gemm, record = SmallGemm(torch.device("cuda")), []
    head = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "unit": "microseconds a call in a captured graph over distinct weights",
    }
    for m in a.m:
        for name, (n, k, gated) in SHAPES.items():
            nbytes = n * k * 2
            weights = [
                torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * 0.02
                for _ in range(max(2, int(1.3e9 / nbytes)))
            ]
            x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
            library = graph_time([lambda w=w: reference(x, w, gated) for w in weights], 5)
            timed = []
            for number, (shape, cfg) in enumerate(candidates(m)):
                if shape == name and (m, number) not in failed and time.time() - began < a.seconds:
                    run = run_of(gemm, name, cfg, x)
                    timed.append((graph_time([lambda w=w: run(w) for w in weights], 3), cfg))
            timed.sort(key=lambda entry: entry[0])
            again = []
            for _, cfg in timed[:6]:
                run = run_of(gemm, name, cfg, x)
                again.append((graph_time([lambda w=w: run(w) for w in weights], 15), cfg))
            again.sort(key=lambda entry: entry[0])
            record.append(
                {
                    "rows": m,
                    "n": n,
                    "k": k,
                    "gated": gated,
                    "library_us": round(library, 2),
                    "timed": len(timed),
                    "best": [{"us": round(us, 2), **asdict(cfg)} for us, cfg in again[:3]],
                }
            )
            print(f"m={m} {name}: library {library:.2f} us {nbytes / library * 1e-6:.2f} TB/s, {len(timed)} timed")
            for us, cfg in again[:4]:
                print(f"   {us:8.2f} us {nbytes / us * 1e-6:.2f} TB/s {cfg}", flush=True)
            if a.out:
                Path(a.out).write_text(json.dumps(head | {"measured": record}, indent=1) + "\n")
            del weights
    print(f"timed in {time.time() - began:.1f} s")


if __name__ == "__main__":
    main()

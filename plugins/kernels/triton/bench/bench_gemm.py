"""Searches tile shapes of the small-m products on the present device and prints TB/s beside cuBLAS.

python plugins/kernels/triton/bench/bench_gemm.py [--m 1 8 16 32]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from tokenspeed_plugin_kernels_triton.gemm import SmallGemm
from tokenspeed_plugin_kernels_triton.tuning import GemmConfig

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}


def graph_time(calls, reps=5):
    """Microseconds per call of a captured graph of ``calls``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for c in calls[:2]:
            c()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for c in calls:
            c()
    graph.replay()
    best = 1e9
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        best = min(best, a.elapsed_time(b) * 1e3 / len(calls))
    return best


def configs(m):
    if m == 1:
        for bn, bk, s, w, st in itertools.product((4, 8, 16, 32), (256, 512, 1024), (1, 2, 4), (2, 4, 8), (1, 3)):
            if 2048 <= bn * bk <= 16384 and bn * bk // (w * 32) <= 64 and bn * bk // (w * 32) >= 8:
                yield GemmConfig(1, bn, bk, s, w, st)
    bm = max(16, 1 << (m - 1).bit_length())
    for bn, bk, s, w, st in itertools.product((32, 64, 128), (64, 128, 256), (1, 2, 4, 8), (4,), (3, 4, 6)):
        if (bn * bk + bm * bk) * 2 * st <= 200_000 and bn * bk * st >= 16384:
            yield GemmConfig(bm, bn, bk, s, w, st)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--m", type=int, nargs="*", default=[1, 8, 16, 32])
    p.add_argument("--out")
    p.add_argument("--seconds", type=float, default=400)
    a = p.parse_args()
    dev = torch.device("cuda")
    t_end = time.time() + a.seconds
    gemm = SmallGemm(dev)
    results = {}
    weights = {}
    for name, (n, k) in SHAPES.items():
        copies = max(2, min(24, int(600e6 / (n * k * 2))))
        weights[name] = [torch.randn(n, k, dtype=torch.bfloat16, device=dev) * 0.02 for _ in range(copies)]
    for m in a.m:
        best = {}
        for name, (n, k) in SHAPES.items():
            x = torch.randn(m, k, dtype=torch.bfloat16, device=dev)
            t = graph_time([lambda w=w: torch.nn.functional.linear(x, w) for w in weights[name]])
            best[name] = (t, None)
            print(f"m={m} {name} cublas {t:.1f} us {n * k * 2 / t * 1e-6:.2f} TB/s", flush=True)
        for cfg in configs(m):
            if time.time() > t_end:
                print("time is up")
                break
            for name, (n, k) in SHAPES.items():
                if k % (cfg.bk * cfg.split_k) or n % cfg.bn or (name in ("head", "gate_up") and cfg.split_k > 2):
                    continue
                x = torch.randn(m, k, dtype=torch.bfloat16, device=dev)
                try:
                    out = gemm(x, weights[name][0], config=cfg)
                    ref = torch.nn.functional.linear(x, weights[name][0])
                    if not torch.allclose(out.float(), ref.float(), atol=2e-2, rtol=2e-2):
                        print("WRONG", cfg, name, (out.float() - ref.float()).abs().max().item())
                        continue
                    t = graph_time([lambda w=w: gemm(x, w, config=cfg) for w in weights[name]], reps=3)
                except Exception as e:
                    print("fail", cfg, name, str(e)[:100])
                    break
                results.setdefault(f"{m}.{name}", []).append((round(t, 2), cfg.__dict__))
        for name, (n, k) in SHAPES.items():
            top = sorted(results.get(f"{m}.{name}", []), key=lambda r: r[0])[:4]
            for t, c in top:
                print(
                    f"m={m} {name} {t:.1f} us {n * k * 2 / t * 1e-6:.2f} TB/s (cublas {best[name][0]:.1f}) {c}",
                    flush=True,
                )
    if a.out:
        Path(a.out).write_text(json.dumps({k: sorted(v, key=lambda r: r[0])[:10] for k, v in results.items()}))


if __name__ == "__main__":
    main()

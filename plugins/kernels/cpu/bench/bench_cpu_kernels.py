"""Speed of the CPU kernels beside torch, and of whole SmolLM2-135M steps made of them.

``python bench_cpu_kernels.py [gemm] [attention] [steps] [calls] [--dtype fp32|bf16] [--threads 2] [--isa NAME]``

Figures are the best of many runs: on a shared machine the best is the figure that the code decides. A step is longer than a
time slice, so beside the best whole step stands the sum of its calls' best times ("undisturbed").
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenspeed_plugin_kernels_cpu.runtime import Runtime

LAYERS, HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
PAGE = 16
GEMM_ROWS = (1, 2, 4, 8, 16, 32, 33, 64, 128, 256, 512, 1024)
GEMM_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))


def best(run: Callable[[], object], seconds: float, at_least: int = 3) -> float:
    """Seconds of the fastest run within about ``seconds``."""
    run()
    fastest, end, count = float("inf"), time.perf_counter() + seconds, 0
    while count < at_least or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - start)
        count += 1
    return fastest


def pair(run: Callable[[], object], other: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Both, in turns, so that a slow spell of the machine meets both."""
    ours, theirs = float("inf"), float("inf")
    for _ in range(4):
        ours = min(ours, best(run, seconds / 8))
        theirs = min(theirs, best(other, seconds / 8))
    return ours, theirs


def bench_gemm(runtime: Runtime, dtype: torch.dtype, seconds: float) -> None:
    """Each run takes another weight, 300 MB apart in all, so that few rows read memory and not the cache, as a step does."""
    print(f"gemm {dtype}, per call: us, GFLOP/s, GB/s of weights; torch F.linear; ratio of speeds")
    for n, k in (*GEMM_SHAPES, (VOCAB, HIDDEN)):
        copies = max(1, 300_000_000 // (n * k * dtype.itemsize))
        weights = [torch.randn(n, k).mul_(0.05).to(dtype) for _ in range(copies)]
        for m in GEMM_ROWS if n != VOCAB else (1, 8, 32):
            x = torch.randn(m, k).to(dtype)
            count = copies if m <= 64 else min(copies, 4)

            def ours(x: torch.Tensor = x, count: int = count) -> None:
                for w in weights[:count]:
                    runtime.linear(x, w)

            def theirs(x: torch.Tensor = x, count: int = count) -> None:
                for w in weights[:count]:
                    F.linear(x, w)

            a, b = (t / count for t in pair(ours, theirs, seconds))
            print(
                f"  M {m:5d} N {n:5d} K {k:4d}: {a * 1e6:9.1f} us {2 * m * n * k / a / 1e9:7.1f} GFLOP/s {n * k * dtype.itemsize / a / 1e9:6.1f} GB/s"
                f" | torch {b * 1e6:9.1f} us {2 * m * n * k / b / 1e9:7.1f} GFLOP/s | {b / a:5.2f}x"
            )


@dataclass
class Context:
    """Rows with ``length`` tokens each in a cache of their own; layers share it in turn, four caches deep."""

    caches: list[tuple[torch.Tensor, torch.Tensor]]
    page_table: torch.Tensor
    seq_lens: torch.Tensor

    @classmethod
    def make(cls, rows: int, length: int, dtype: torch.dtype, layers: int = LAYERS) -> Context:
        pages = -(-length // PAGE)
        shape = (rows * pages, KV_HEADS, PAGE, HEAD_DIM)
        caches = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(layers)]
        table = torch.randperm(rows * pages, dtype=torch.int32).view(rows, pages)
        return cls(caches, table, torch.full((rows,), length, dtype=torch.int32))


def bench_attention(runtime: Runtime, dtype: torch.dtype, seconds: float) -> None:
    print(
        f"decode attention {dtype}, one layer: us, GB/s of keys and values (shared: per step as if each row read its own)"
    )
    for rows, length in ((1, 128), (1, 1600), (8, 256), (8, 1600), (32, 256), (32, 1600)):
        context = Context.make(rows, length, dtype, 6)
        q = torch.randn(rows, Q_HEADS, HEAD_DIM).to(dtype)
        shared_table = context.page_table.clone()
        common = (length - 64) // PAGE
        shared_table[:, :common] = shared_table[0, :common].clone()
        intervals = torch.tensor([[0, rows, 0, common]], dtype=torch.int32)

        def run(
            table: torch.Tensor, given: torch.Tensor | None, context: Context = context, q: torch.Tensor = q
        ) -> None:
            for k, v in context.caches:
                runtime.decode(q, k, v, table, context.seq_lens, 1, 0.125, "HND", prefix_intervals=given)

        moved = 2 * rows * length * KV_HEADS * HEAD_DIM * dtype.itemsize
        plain = best(lambda: run(context.page_table, None), seconds) / 6
        shared = best(lambda: run(shared_table, intervals), seconds) / 6
        print(
            f"  rows {rows:3d} context {length:5d}: {plain * 1e6:8.1f} us {moved / plain / 1e9:6.1f} GB/s | shared prefix {shared * 1e6:8.1f} us"
        )
    print(f"extend attention {dtype}, one layer: us, GFLOP/s; torch SDPA on contiguous keys and values")
    for tokens, prefix in ((16, 1584), (128, 0), (256, 1344), (512, 0), (1024, 0)):
        context = Context.make(1, prefix + tokens, dtype, 1)
        q = torch.randn(tokens, Q_HEADS, HEAD_DIM).to(dtype)
        start = torch.tensor([0, tokens], dtype=torch.int32)
        k, v = context.caches[0]
        flat_k, flat_v = (
            c.transpose(0, 1).reshape(1, KV_HEADS, -1, HEAD_DIM)[:, :, : prefix + tokens].contiguous() for c in (k, v)
        )
        mask = None if prefix == 0 else torch.ones(tokens, prefix + tokens, dtype=torch.bool).tril(prefix)

        def ours(
            q: torch.Tensor = q,
            k: torch.Tensor = k,
            v: torch.Tensor = v,
            context: Context = context,
            start: torch.Tensor = start,
        ) -> None:
            runtime.extend(q, k, v, context.page_table, context.seq_lens, start, 0.125, "HND")

        def theirs(
            q: torch.Tensor = q, k: torch.Tensor = flat_k, v: torch.Tensor = flat_v, mask: torch.Tensor | None = mask
        ) -> None:  # fmt: skip
            F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, mask, is_causal=mask is None, enable_gqa=True)

        a, b = pair(ours, theirs, seconds)
        flop = 4 * Q_HEADS * HEAD_DIM * (tokens * prefix + tokens * (tokens + 1) // 2)
        print(
            f"  tokens {tokens:5d} prefix {prefix:5d}: {a * 1e6:9.1f} us {flop / a / 1e9:7.1f} GFLOP/s | torch {b * 1e6:9.1f} us | {b / a:5.2f}x"
        )


class Model:
    """A SmolLM2-135M step: random weights, the calls of the real one."""

    def __init__(self, runtime: Runtime, dtype: torch.dtype) -> None:
        self.runtime = runtime
        self.fused = True
        sizes = ((960, 576), (576, 576), (3072, 576), (576, 1536))
        self.layers = [[torch.randn(n, k).mul_(k**-0.5).to(dtype) for n, k in sizes] for _ in range(LAYERS)]
        self.table = torch.randn(VOCAB, HIDDEN).mul_(0.04).to(dtype)
        self.norm_weight = torch.ones(HIDDEN, dtype=dtype)
        self.cos_sin = torch.randn(4096, HEAD_DIM)

    def step(
        self, context: Context, tokens: int, start: torch.Tensor | None, sampled: int, calls: list[tuple[str, float]]
    ) -> torch.Tensor:
        """One step of ``tokens`` tokens: decode rows, or one chunk where ``start`` is given. Appends (name, seconds) of each call."""

        def timed(name: str, since: float) -> float:
            now = time.perf_counter()
            calls.append((name, now - since))
            return now

        t = time.perf_counter()
        ids = torch.zeros(tokens, dtype=torch.int64)
        length = int(context.seq_lens[0])
        positions = torch.arange(length - tokens, length) if start is not None else torch.full((tokens,), length - 1)
        pages = context.page_table[0] if start is not None else context.page_table[:, -1]
        slots = (
            pages[(positions // PAGE)] * PAGE + positions % PAGE
            if start is not None
            else pages * PAGE + positions % PAGE
        )
        slots = slots.long()
        residual = self.runtime.lookup(ids, self.table)
        hidden = self.runtime.rms_norm(residual, self.norm_weight, 1e-5)
        t = timed("other", t)
        for (qkv, o, gate_up, down), (k_cache, v_cache) in zip(self.layers, context.caches, strict=True):
            rows = self.runtime.linear(hidden, qkv)
            t = timed("linear", t)
            q = self.runtime.qkv_rope_write(
                rows, positions, self.cos_sin, Q_HEADS, KV_HEADS, HEAD_DIM, k_cache, v_cache, slots, "HND"
            )
            t = timed("rope", t)
            if start is not None:
                a = self.runtime.extend(q, k_cache, v_cache, context.page_table, context.seq_lens, start, 0.125, "HND")
            else:
                a = self.runtime.decode(q, k_cache, v_cache, context.page_table, context.seq_lens, 1, 0.125, "HND")
            t = timed("attention", t)
            a = self.runtime.linear(a.view(tokens, -1), o)
            t = timed("linear", t)
            hidden, _ = self.runtime.add_rms_norm(a, residual, self.norm_weight, 1e-5)
            t = timed("norm", t)
            if self.fused:
                hidden = self.runtime.linear_silu_mul(hidden, gate_up)
                t = timed("linear", t)
            else:
                hidden = self.runtime.linear(hidden, gate_up)
                t = timed("linear", t)
                hidden = self.runtime.silu_and_mul(hidden)
                t = timed("activation", t)
            hidden = self.runtime.linear(hidden, down)
            t = timed("linear", t)
            hidden, _ = self.runtime.add_rms_norm(hidden, residual, self.norm_weight, 1e-5)
            t = timed("norm", t)
        logits = self.runtime.linear(hidden[-sampled:], self.table)
        t = timed("head", t)
        result = self.runtime.argmax(logits)
        timed("other", t)
        return result


def bench_steps(runtime: Runtime, dtype: torch.dtype, seconds: float, only: str) -> None:
    model = Model(runtime, dtype)
    print(f"SmolLM2-135M steps {dtype}: parts of the undisturbed step in ms")
    for name, rows, length, chunk in (
        ("decode 1", 1, 192, 0), ("decode 8", 8, 192, 0), ("decode 32", 32, 192, 0), ("decode 32, context 1600", 32, 1600, 0),
        ("prefill 128", 1, 128, 128), ("prefill 256 after 768", 1, 1024, 256), ("prefill 512", 1, 512, 512), ("prefill 1024", 1, 1024, 1024),
    ):  # fmt: skip
        if only not in name:
            continue
        context = Context.make(rows, length, dtype)
        start = torch.tensor([0, chunk], dtype=torch.int32) if chunk else None
        tokens = chunk or rows
        sampled = 1 if chunk else rows
        for fused in (True, False):
            model.fused = fused
            fastest, shortest, names = float("inf"), torch.empty(0), []
            model.step(context, tokens, start, sampled, [])
            end = time.perf_counter() + seconds * 2
            while time.perf_counter() < end:
                calls: list[tuple[str, float]] = []
                begin = time.perf_counter()
                model.step(context, tokens, start, sampled, calls)
                fastest = min(fastest, time.perf_counter() - begin)
                taken = torch.tensor([seconds for _, seconds in calls])
                shortest = taken if not names else torch.minimum(shortest, taken)
                names = [name for name, _ in calls]
            undisturbed = float(shortest.sum())
            parts: dict[str, float] = {}
            for part, value in zip(names, shortest.tolist(), strict=True):
                parts[part] = parts.get(part, 0.0) + value * 1e3
            detail = ", ".join(f"{key} {value:.2f}" for key, value in parts.items())
            print(
                f"  {name:24s} {'fused ' if fused else 'plain '} best {fastest * 1e3:8.2f} ms, undisturbed {undisturbed * 1e3:8.2f} ms"
                f" {tokens / undisturbed:9.1f} tok/s | {detail}"
            )


def bench_calls(runtime: Runtime) -> None:
    """Cost of a call whose work is next to nothing."""
    x, w, weight = torch.randn(1, 16), torch.randn(8, 16), torch.ones(16)
    calls = {
        "torch.empty": lambda: x.new_empty((1, 8)),
        "F.linear": lambda: F.linear(x, w),
        "gemm.linear": lambda: runtime.linear(x, w),
        "norm.rms_norm": lambda: runtime.rms_norm(x, weight, 1e-5),
        "activation.silu_and_mul": lambda: runtime.silu_and_mul(x),
    }
    for name, call in calls.items():
        print(f"  {name:26s} {best(lambda: [call() for _ in range(1000)], 0.3) * 1e3:6.2f} us")


def pin_threads() -> None:
    """The first processor for this thread, the others for the workers: a busy machine may put both on one (Linux only)."""
    first, *others = sorted(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), others or [first])
    os.sched_setaffinity(0, [first])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["calls", "gemm", "attention", "steps"])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="")
    parser.add_argument(
        "--pin", action="store_true", help="keep each thread on a processor of its own (torch's own threads come later)"
    )
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    runtime = Runtime(options.threads, options.isa)
    if options.pin:
        pin_threads()
    dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
    print(f"{runtime.isa}, {runtime.num_threads} threads, torch {torch.__version__}")
    if "calls" in options.what:
        bench_calls(runtime)
    if "gemm" in options.what:
        bench_gemm(runtime, dtype, options.seconds)
    if "attention" in options.what:
        bench_attention(runtime, dtype, options.seconds)
    if "steps" in options.what:
        bench_steps(runtime, dtype, options.seconds, options.only)


if __name__ == "__main__":
    main()

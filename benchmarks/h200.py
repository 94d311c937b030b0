"""The H200 table: our engine on the shape of Qwen3-8B beside vLLM 0.25.1 and the roofline, in one run of some minutes.

    python benchmarks/h200.py [--only tpot,ttft,mixed,agent,kernels] [--json FILE] [--commit HASH] [--set FIELD=VALUE ...]

bf16 weights normal(0, 0.02), prompts of distinct random ids, greedy, end tokens ignored, through the engine's own loop in this process. TPOT is (time of 129
tokens - time of 1) / 128 with the prompts' prefix in the cache; medians of 3. vLLM's column and the floors were measured on the same card (one H200, torch
2.11, CUDA graphs on, 8,192 batched tokens, prefix caching on).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 135168,  # raised, for the rows at 128k
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
PROMPT_IDS = 150000
PARTS = ("tpot", "long", "ttft", "mixed", "agent", "kernels")


class Bench:
    """One engine and the rows measured on it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        began = time.perf_counter()
        from tokenspeed.config import EngineConfig
        from tokenspeed.engine.assembly import assemble
        from tokenspeed.engine.local import LocalEngine
        from tokenspeed.messages import SamplingParams
        from tokenspeed.weights.describe import describe_model

        directory = tempfile.mkdtemp()
        Path(directory, "config.json").write_text(json.dumps(SHAPE))
        config = EngineConfig(model=directory, load_format="dummy", **settings)
        self.assembly = assemble(config, describe_model(directory, "dummy"))
        self.engine = LocalEngine(self.assembly)
        self.ready_s = time.perf_counter() - began
        self.params = SamplingParams
        self.rng = np.random.default_rng(0)
        gc.collect()
        gc.freeze()

    def prompt(self, tokens: int) -> list[int]:
        return self.rng.integers(0, PROMPT_IDS, tokens).tolist()

    def greedy(self, tokens: int) -> Any:
        return self.params(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)

    def time(self, prompts: Sequence[list[int]], tokens: int) -> float:
        """Seconds until all prompts have their ``tokens``."""
        began = time.perf_counter()
        outputs = self.engine.generate(prompts, self.greedy(tokens))
        took = time.perf_counter() - began
        for parts in outputs:
            assert sum(len(part.tokens) for part in parts) == tokens, parts[-1]
        return took

    def tpot(self, batch: int, context: int, repeats: int = 3) -> float:
        """Milliseconds a token. A context of whole pages and one token leaves one token of each prompt to compute."""
        prompts = [self.prompt(context) for _ in range(batch)]
        self.time(prompts, 1)
        return statistics.median(self.time(prompts, 129) - self.time(prompts, 1) for _ in range(repeats)) / 128 * 1e3

    def ttft(self, tokens: int, repeats: int = 5) -> float:
        """Milliseconds from the request to its first token, nothing else running."""
        self.time([self.prompt(tokens)], 1)
        return statistics.median(self.time([self.prompt(tokens)], 1) for _ in range(repeats)) * 1e3

    def mixed(self, alone_ms: float, arrivals: int = 10) -> dict[str, float]:
        """32 decodes while a prompt of 8,192 tokens arrives each second."""
        engine = self.engine
        decodes = {engine.add_request(self.prompt(1024), self.greedy(4000)) for _ in range(32)}
        last: dict[int, float] = {}
        while len(last) < 32:
            now = time.perf_counter()
            last |= {item.rid: now for item in engine.step() if item.rid in decodes}
        for _ in range(50):
            engine.step()
        last.clear()
        gaps: list[float] = []
        ttfts: list[float] = []
        asked: dict[int, float] = {}
        began, sent = time.perf_counter(), 0
        while len(ttfts) < arrivals:
            if sent < arrivals and time.perf_counter() - began >= sent:
                asked[engine.add_request(self.prompt(8192), self.greedy(1))] = time.perf_counter()
                sent += 1
            items = engine.step()
            now = time.perf_counter()
            for item in items:
                if item.rid in decodes and item.tokens:
                    if item.rid in last:
                        gaps.append(now - last[item.rid])
                    last[item.rid] = now
                elif item.rid in asked:
                    ttfts.append(now - asked.pop(item.rid))
        for rid in decodes:
            engine.abort(rid)
        while engine.busy:
            engine.step()
        p50, p99 = np.percentile(gaps, [50, 99]) * 1e3
        return {"p50": p50, "p99": p99, "max": max(gaps) * 1e3, "ttft": statistics.median(ttfts) * 1e3 / alone_ms}

    def agent(self, requests: int = 64, repeats: int = 3) -> float:
        """Seconds for 64 requests at once: 8,192 shared tokens (in the cache), 512 own, 128 new."""
        shared = self.prompt(8192)
        self.time([shared + self.prompt(16)], 1)
        return statistics.median(
            self.time([shared + self.prompt(512) for _ in range(requests)], 128) for _ in range(repeats)
        )


def rows(bench: Bench, parts: Sequence[str], start_s: dict[str, float]) -> list[tuple[str, float, float, float]]:
    """(row, vLLM, floor, ours), each printed as soon as it is there."""
    table: list[tuple[str, float, float, float]] = []

    def row(name: str, vllm: float, floor: float, ours: float) -> None:
        table.append((name, vllm, floor, ours))
        verdict = "" if not vllm else "ahead" if ours < vllm else "BEHIND"
        print(f"{name:<42} {vllm or '':>8} {floor or '':>7} {ours:>9.2f}  {verdict}", flush=True)

    print(f"{'row':<42} {'vLLM':>8} {'floor':>7} {'ours':>9}", flush=True)
    if "tpot" in parts:
        marks = {
            1: (5.25, 3.6),
            8: (5.78, 3.9),
            32: (6.69, 4.8),
            64: (8.12, 6.0),
            128: (11.45, 8.4),
            256: (19.14, 13.2),
        }
        for batch, (vllm, floor) in marks.items():
            row(f"TPOT ms, ctx 1.1k, batch {batch}", vllm, floor, bench.tpot(batch, 1025))
    if "long" in parts:
        row("TPOT ms, ctx 32k, batch 1", 6.40, 4.7, bench.tpot(1, 32705))
        row("TPOT ms, ctx 128k, batch 1", 9.81, 8.1, bench.tpot(1, 131009, repeats=1))
    alone = 0.0
    if "ttft" in parts or "mixed" in parts:
        for tokens, vllm, floor in ((1024, 36.3, 21), (8192, 222, 188), (32768, 1269, 1087)):
            if "ttft" in parts or tokens == 8192:
                measured = bench.ttft(tokens, 5 if tokens < 32768 else 3)
                alone = measured if tokens == 8192 else alone
                row(f"TTFT ms, prompt {tokens}", vllm, floor, measured)
    if "mixed" in parts:
        gaps = bench.mixed(alone)
        row("gap ms, 32 decodes + 8k prompt a second, p50", 7.23, 0, gaps["p50"])
        row("gap ms, p99", 30.7, 0, gaps["p99"])
        row("gap ms, max", 192, 0, gaps["max"])
        row("the prompts' TTFT, times alone (reach 1.5)", 0, 0, gaps["ttft"])
    if "agent" in parts:
        row("agent64 s", 3.60, 1.5, bench.agent())
    for name, seconds in start_s.items():
        row(f"start to ready s, kernel caches {name}", 78, 0, seconds)
    return table


def cold_start(arguments: Sequence[str]) -> float:
    """Seconds that another process takes from its start to a ready engine with the caches as they are now."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, "--start-only", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return time.perf_counter() - began


def save(path: str | None, record: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(record, indent=1) + "\n")


def count_compilations() -> Callable[[], int]:
    """From now on counts what Triton compiles; the engine should compile nothing after it is ready."""
    from triton import knobs

    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append(str(what.get("key", ""))[:80]) and None
    return lambda: len(compiled)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--only", default=",".join(PARTS), help=f"parts: {', '.join(PARTS)}")
    p.add_argument("--json", help="file to write the figures to")
    p.add_argument("--commit", default="", help="noted with the figures")
    p.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the engine's settings, as JSON"
    )
    p.add_argument("--cold", action="store_true", help="first start another engine, so that this one finds warm caches")
    p.add_argument("--start-only", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings: dict[str, Any] = {"max_step_ms": 21.0}
    for text in a.set:
        field, _, value = text.partition("=")
        settings[field] = json.loads(value)
    start_s = {}
    if a.cold:
        start_s["cold"] = cold_start([f"--set={text}" for text in a.set])
    bench = Bench(settings)
    if a.start_only:
        os._exit(0)
    start_s["warm" if a.cold else "as found"] = bench.ready_s
    print(bench.assembly.explain(), flush=True)
    compiled = count_compilations()
    table = rows(bench, a.only.split(","), start_s)
    print(f"compiled after ready: {compiled()}", flush=True)
    record = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": a.commit,
        "device": bench.engine.info.device,
        "settings": settings,
        "compiled_after_ready": compiled(),
        "rows": [dict(zip(("row", "vllm", "floor", "ours"), entry, strict=True)) for entry in table],
    }
    save(a.json, record)
    if "kernels" in a.only.split(","):
        from h200_kernels import kernel_table

        assembly = bench.assembly
        del bench  # its KV pool fills the device
        gc.unfreeze()
        gc.collect()
        record["kernels"] = kernel_table(assembly)
        save(a.json, record)


if __name__ == "__main__":
    main()

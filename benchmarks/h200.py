"""The H200 table: our engine on the shape of Qwen3-8B beside vLLM 0.25.1 and the roofline, in one run of some minutes.

    python benchmarks/h200.py [--only start,tpot,long,ttft,gap,agent64,kernels] [--cold] [--json FILE] [--commit HASH] [--set FIELD=VALUE ...]

Each row stands beside vLLM's figure, the floor and the figure to reach, with a verdict; ``share`` is floor / ours. The seconds that the run took come last.

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
from typing import Any, NamedTuple

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
PARTS = ("start", "tpot", "long", "ttft", "gap", "agent64", "kernels")


class Mark(NamedTuple):
    """What a row is compared with; ``None`` where there is no such figure."""

    vllm: float | None = None
    floor: float | None = None
    reach: float | None = None


TPOT = {
    1: Mark(5.25, 3.6, 4.3),
    8: Mark(5.78, 3.9, 4.7),
    32: Mark(6.69, 4.8, 5.7),
    64: Mark(8.12, 6.0, 7.0),
    128: Mark(11.45, 8.4, 9.8),
    256: Mark(19.14, 13.2, 16),
}
TTFT = {1024: Mark(36.3, 21, 30), 8192: Mark(222, 188, 214), 32768: Mark(1269, 1087, 1230)}


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


class Table:
    """The rows, each printed as soon as it is there."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        print(f"{'row':<42} {'vLLM':>8} {'floor':>7} {'to reach':>9} {'ours':>9} {'share':>6}  verdict", flush=True)

    def add(self, name: str, mark: Mark, ours: float) -> None:
        """A row and its verdict, both against vLLM and against the figure to reach."""
        ours = round(ours, 3)
        ahead = "" if mark.vllm is None else "ahead" if ours < mark.vllm else "BEHIND"
        reached = (
            "" if mark.reach is None else "reached" if ours <= mark.reach else f"missed by {ours / mark.reach - 1:.1%}"
        )
        share = None if mark.floor is None else round(mark.floor / ours, 3)
        self.rows.append(
            {"row": name, **mark._asdict(), "ours": ours, "share": share, "ahead": ahead, "reached": reached}
        )
        cells = ["" if figure is None else f"{figure:g}" for figure in mark]
        part = "" if share is None else f"{share:.0%}"
        verdict = ", ".join(filter(None, (ahead, reached)))
        print(f"{name:<42} {cells[0]:>8} {cells[1]:>7} {cells[2]:>9} {ours:>9.2f} {part:>6}  {verdict}", flush=True)


def measure(bench: Bench, parts: Sequence[str], start_s: dict[str, float]) -> list[dict[str, Any]]:
    """The rows of ``parts``."""
    table = Table()
    if "tpot" in parts:
        for batch, mark in TPOT.items():
            table.add(f"TPOT ms, ctx 1.1k, batch {batch}", mark, bench.tpot(batch, 1025))
    if "long" in parts:
        table.add("TPOT ms, ctx 32k, batch 1", Mark(6.40, 4.7, 5.5), bench.tpot(1, 32705))
        table.add("TPOT ms, ctx 128k, batch 1", Mark(9.81, 8.1, 9.0), bench.tpot(1, 131009, repeats=1))
    alone = 0.0
    for tokens, mark in TTFT.items():
        if "ttft" in parts or ("gap" in parts and tokens == 8192):
            measured = bench.ttft(tokens, 5 if tokens < 32768 else 3)
            alone = measured if tokens == 8192 else alone
            table.add(f"TTFT ms, prompt {tokens}", mark, measured)
    if "gap" in parts:
        gaps = bench.mixed(alone)
        table.add("gap ms, 32 decodes + 8k prompt a second, p50", Mark(7.23), gaps["p50"])
        table.add("gap ms, p99", Mark(30.7, None, 25), gaps["p99"])
        table.add("gap ms, max", Mark(192, None, 40), gaps["max"])
        table.add("the prompts' TTFT, times alone", Mark(None, None, 1.5), gaps["ttft"])
    if "agent64" in parts:
        table.add("agent64 s", Mark(3.60, 1.5, 2.0), bench.agent())
    if "start" in parts:
        for name, seconds in start_s.items():
            mark = Mark(78) if name == "cold" else Mark(78, None, 20)
            table.add(f"start to ready s, kernel caches {name}", mark, seconds)
    return table.rows


def parts_of(text: str) -> list[str]:
    """Reads ``--only``. Raises ``argparse.ArgumentTypeError`` for a part that there is not."""
    parts = text.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r} (choose from {', '.join(PARTS)})")
    return parts


def commit_here() -> str:
    """The commit of this tree, with ``+`` where files differ from it; empty outside a repository."""
    where = Path(__file__).parent
    git = ["git", "-C", str(where)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


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
    p.add_argument("--only", type=parts_of, default=list(PARTS), metavar="PART,PART", help=f"of {', '.join(PARTS)}")
    p.add_argument("--json", help="file to write the figures to")
    p.add_argument("--commit", default=commit_here(), help="noted with the figures (default: this tree's)")
    p.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the engine's settings, as JSON"
    )
    p.add_argument("--cold", action="store_true", help="first start another engine, so that this one finds warm caches")
    p.add_argument("--start-only", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    began = time.perf_counter()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings: dict[str, Any] = {"max_step_ms": 24.0}
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
    table = measure(bench, a.only, start_s)
    print(f"compiled after ready: {compiled()}", flush=True)
    record = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": a.commit,
        "device": bench.engine.info.device,
        "settings": settings,
        "compiled_after_ready": compiled(),
        "rows": table,
        "run_s": round(time.perf_counter() - began, 1),
    }
    save(a.json, record)
    if "kernels" in a.only:
        from h200_kernels import kernel_table

        assembly = bench.assembly
        del bench  # its KV pool fills the device
        gc.unfreeze()
        gc.collect()
        record["kernels"] = kernel_table(assembly)
        record["run_s"] = round(time.perf_counter() - began, 1)
        save(a.json, record)
    missed = [row["row"] for row in table if row["reached"].startswith("missed")]
    behind = [row["row"] for row in table if row["ahead"] == "BEHIND"]
    print(f"behind vLLM: {', '.join(behind) or 'none'}; short of the figure to reach: {', '.join(missed) or 'none'}")
    print(f"the whole run took {record['run_s']:.0f} s (at most 480 with every part)", flush=True)


if __name__ == "__main__":
    main()

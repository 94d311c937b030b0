"""Keys and values in fp8 beside the model's own bf16, on the shape of Qwen3-8B: times, room, and the error in log probabilities.

    python benchmarks/h200_fp8.py [--json FILE] [--commit HASH]

One process for each type, with the same weights and prompts. Told are TPOT and TTFT as ``h200.py`` measures them, how many tokens the pool holds, and by how
much the log probabilities of four prompts of 999 random ids differ (weights are random too, a hard case: 36 layers amplify what a trained model damps).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from h200 import Bench, commit_here, save

TYPES = ("auto", "fp8")


def measure(kv_cache_dtype: str) -> dict[str, Any]:
    """One engine's figures; log probabilities of the prompts' tokens, (4, 998), nats."""
    bench = Bench({"kv_cache_dtype": kv_cache_dtype, "max_num_seqs": 64, "max_step_ms": 24.0})
    params = bench.params(max_new_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    prompts = [bench.prompt(999) for _ in range(4)]
    scores = []
    for parts in bench.engine.generate(prompts, params):
        told = next(part.prompt_logprobs for part in parts if part.prompt_logprobs)
        scores.append([entry.logprob for entry in told[1:] if entry is not None])
    return {
        "pool_tokens": bench.engine.info.kv_pages * bench.engine.info.page_size,
        **{f"tpot_ms_{batch}": round(bench.tpot(batch, 1025), 3) for batch in (1, 32, 64)},
        "tpot_ms_1_at_32k": round(bench.tpot(1, 32705), 3),
        "ttft_ms_8192": round(bench.ttft(8192), 2),
        "logprobs": scores,
    }


def apart(one: list[list[float]], other: list[list[float]]) -> dict[str, float]:
    """How far two engines' log probabilities lie from each other."""
    a, b = np.array(one), np.array(other)
    error = np.abs(a - b)
    figures = {
        "mean": error.mean(),
        "rms": np.sqrt((error**2).mean()),
        "p99": np.percentile(error, 99),
        "max": error.max(),
        "spread of the log probabilities": a.std(),
    }
    return {name: round(float(value), 4) for name, value in figures.items()}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--json", help="file to write the figures to")
    p.add_argument("--commit", default=commit_here(), help="noted with the figures (default: this tree's)")
    p.add_argument("--one", choices=TYPES, help=argparse.SUPPRESS)
    p.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.one:
        a.to.write_text(json.dumps(measure(a.one)))
        return
    found = {}
    for name in TYPES:
        with tempfile.TemporaryDirectory() as folder:
            to = Path(folder, "figures.json")
            subprocess.run([sys.executable, __file__, "--one", name, "--to", str(to)], check=True)
            found[name] = json.loads(to.read_text())
    errors = apart(found["auto"].pop("logprobs"), found["fp8"].pop("logprobs"))
    for row in found["auto"]:
        print(f"{row:<20} bf16 {found['auto'][row]:>12} fp8 {found['fp8'][row]:>12}", flush=True)
    print("error in log probabilities, nats:", json.dumps(errors))
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    save(a.json, {"date": date, "commit": a.commit, **found, "logprob_error": errors})


if __name__ == "__main__":
    main()

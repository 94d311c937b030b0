"""What serving over HTTP costs beside the engine's own loop: the shape of Qwen3-8B, prompts as ids, 64 requests in flight.

    python benchmarks/h200_http.py [--requests 384] [--input-len 1024] [--output-len 256] [--json FILE] [--commit HASH]

First ``tokenspeed serve --skip-tokenizer-init`` under ``tokenspeed bench serve``, each a process of its own; then the same requests through the loop inside
this process, a new one as soon as one ends. CPU time is that of the server's processes alone, between the first request and the last.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from h200 import SHAPE

VOCAB = 150000
CLI = [sys.executable, "-c", "import sys; from tokenspeed.cli.main import main; sys.exit(main())"]
_TICK = os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """A process and all below it."""
    found, parents = [pid], {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    for at in found:
        found += [child for child, parent in parents.items() if parent == at]
    return found


def cpu_seconds(pid: int) -> dict[int, float]:
    """User and system time by process."""
    times = {}
    for one in children(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        times[one] = (int(fields[11]) + int(fields[12])) / _TICK
    return times


def over_http(directory: str, args: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = Path(tempfile.mkstemp()[1])
    command = [
        *CLI, "serve", directory, "--load-format", "dummy", "--skip-tokenizer-init",
        "--port", str(port), *(["--max-step-ms", str(args.max_step_ms)] if args.max_step_ms else []),
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)
    try:
        began = time.monotonic()
        while True:
            if server.poll() is not None or time.monotonic() - began > 150:
                sys.exit(log.read_text()[-6000:])
            try:
                if urllib.request.urlopen(f"{url}/health", timeout=2).status == 200:
                    break
            except OSError:
                time.sleep(0.25)
        print(f"ready in {time.monotonic() - began:.1f} s", flush=True)
        result = {}
        for run in ("warm", "counted"):
            before, clock = cpu_seconds(server.pid), time.monotonic()
            out = Path(tempfile.mkstemp()[1])
            subprocess.run(
                [
                    *CLI, "bench", "serve", "--base-url", url, "--endpoint", "generate", "--vocab-size", str(VOCAB),
                    "--num-prompts", str(args.requests if run == "counted" else 64), "--input-len", str(args.input_len), "--output-len", str(args.output_len),
                    "--max-concurrency", str(args.concurrency), "--no-progress", "--json", str(out), "--seed", "7" if run == "counted" else "8",
                ],
                check=True,
            )  # fmt: skip
            after = cpu_seconds(server.pid)
            used = {pid: seconds - before.get(pid, 0.0) for pid, seconds in after.items()}
            result = json.loads(out.read_text())
            result["wall_with_client_start_s"] = round(time.monotonic() - clock, 2)
            tokens = args.requests * args.output_len
            result["cpu_us_per_token"] = {
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[-60:]: round(seconds / tokens * 1e6, 1)
                for pid, seconds in used.items()
                if seconds > 0.02
            }  # fmt: skip
        return result
    finally:
        server.terminate()
        server.wait(30)


def offline(directory: str, args: argparse.Namespace) -> float:
    """Output tokens a second of the loop in this process."""
    from tokenspeed.config import EngineConfig
    from tokenspeed.engine.assembly import assemble
    from tokenspeed.engine.local import LocalEngine
    from tokenspeed.messages import SamplingParams
    from tokenspeed.weights.describe import describe_model

    settings = {"max_step_ms": args.max_step_ms} if args.max_step_ms else {}
    config = EngineConfig(model=directory, load_format="dummy", **settings)
    engine = LocalEngine(assemble(config, describe_model(directory, "dummy")))
    params = SamplingParams(max_new_tokens=args.output_len, temperature=0.0, ignore_eos=True)
    rng = np.random.default_rng(7)

    def run(count: int) -> float:
        prompts = [rng.integers(0, VOCAB, args.input_len).tolist() for _ in range(count)]
        began, living = time.perf_counter(), 0
        while prompts or living:
            while prompts and living < args.concurrency:
                engine.add_request(prompts.pop(), params)
                living += 1
            living -= sum(1 for item in engine.step() if item.finish)
        return count * args.output_len / (time.perf_counter() - began)

    run(64)
    return run(args.requests)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--requests", type=int, default=384)
    p.add_argument("--concurrency", type=int, default=64)
    p.add_argument("--input-len", type=int, default=1024)
    p.add_argument("--output-len", type=int, default=256)
    p.add_argument("--max-step-ms", type=float, default=0.0)
    p.add_argument("--json")
    p.add_argument("--commit", default="")
    args = p.parse_args()
    directory = tempfile.mkdtemp()
    Path(directory, "config.json").write_text(json.dumps(SHAPE))
    served = over_http(directory, args)
    alone = offline(directory, args)
    rate = served["output_throughput"]
    print(json.dumps({key: value for key, value in served.items() if key != "config"}, indent=1)[:3000])
    print(f"offline {alone:.0f} tokens/s, over HTTP {rate:.0f} ({rate / alone:.3f} of it)")
    if args.json:
        record = {
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "commit": args.commit,
            "offline_tokens_per_s": round(alone, 1),
        }
        Path(args.json).write_text(json.dumps(record | {"served": served}, indent=1) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Our server beside others on the CPU, over HTTP, in one run: interleaved rounds, the same client, the same prompts.

    python benchmarks/cpu_serving.py --client bench_openai.py --model-dir SMOLLM2_DIR --gguf smollm2-f32.gguf \
        --llama-server llama.cpp/build/bin/llama-server --vllm vllm-venv/bin/vllm --rounds 3 --json result.json

Each round starts every server in turn (alone on the machine), waits until it completes a token, reads the memory of its idle process tree (PSS),
runs the rows of ``ROWS`` and stops it. The result is the median over rounds. Peers that are not given are left out. ``benchmarks/README.md`` says
how to build them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "m"


@dataclass(frozen=True)
class Row:
    """One measurement: flags of the client, and what of its result counts."""

    name: str
    flags: tuple[str, ...]
    quick: tuple[str, ...] = ()


def _closed_loop(concurrency: int, requests: int, quick: int) -> Row:
    common = ("--concurrency", str(concurrency), "--prompt-tokens", "128", "--max-tokens", "128")
    return Row(f"c{concurrency}", (*common, "--num-requests", str(requests)), (*common, "--num-requests", str(quick)))


ROWS = (
    _closed_loop(1, 8, 3),
    _closed_loop(8, 32, 16),
    _closed_loop(32, 128, 64),
    Row(
        "shared",
        (
            "--concurrency",
            "4",
            "--num-requests",
            "16",
            "--shared-prefix",
            "1500",
            "--prompt-tokens",
            "64",
            "--max-tokens",
            "16",
            "--warmup-no-prefix",
        ),
    ),
    Row("prefill1024", ("--concurrency", "1", "--num-requests", "6", "--prompt-tokens", "1024", "--max-tokens", "2")),
)


@dataclass(frozen=True)
class Server:
    """How to start one server; ``{port}`` in ``command`` is filled in."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    start_timeout_s: float = 300.0


def servers(args: argparse.Namespace) -> list[Server]:
    """The servers that the arguments describe, ours first."""
    ours = (
        shutil.which("tokenspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        or "tokenspeed"
    )

    def tokenspeed(name: str, dtype: str) -> Server:
        command = (
            ours,
            "serve",
            str(args.model_dir),
            "--served-model-name",
            MODEL,
            "--port",
            "{port}",
            "--dtype",
            dtype,
            "--max-model-len",
            "8192",
        )
        return Server(name, (*command, *args.ours_flags.split()))

    found = [tokenspeed("tokenspeed", "float32")]
    if args.bf16:
        found.append(tokenspeed("tokenspeed-bf16", "bfloat16"))
    if args.llama_server:
        slots = ("-t", "2", "-tb", "2", "-np", "32", "-c", "65536")
        found.append(
            Server(
                "llama.cpp",
                (
                    str(args.llama_server),
                    "-m",
                    str(args.gguf),
                    *slots,
                    "--alias",
                    MODEL,
                    "--no-webui",
                    "--port",
                    "{port}",
                ),
            )
        )
    if args.vllm:
        command = (str(args.vllm), "serve", str(args.model_dir), "--served-model-name", MODEL, "--dtype", "float32")
        environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}
        found.append(
            Server(
                "vllm-cpu", (*command, "--max-model-len", "8192", "--port", "{port}"), environment, start_timeout_s=600
            )
        )
    return found


def free_port() -> int:
    """A port whose successor is free as well (control routes listen there)."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                two.bind(("127.0.0.1", port + 1))
                return int(port)


def complete_one_token(port: int) -> bool:
    """Whether the server answers a completion now."""
    body = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def process_tree(pid: int) -> list[int]:
    """``pid`` and all its descendants, from ``/proc``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop())
        queue += children.get(found[-1], [])
    return found


def pss_mb(pid: int) -> float:
    """Proportional set size of the whole process tree in MiB: shared pages are counted once."""
    total_kb = 0
    for member in process_tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total_kb += int(line.split()[1])
    return total_kb / 1024


@contextlib.contextmanager
def running(server: Server, log: Path) -> Iterator[tuple[int, int, float]]:
    """Start ``server`` and yield (port, pid, seconds until it completed a token); stop it and its children afterwards."""
    port = free_port()
    command = [part.format(port=port) for part in server.command]
    with log.open("wb") as output:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | server.environment,
            start_new_session=True,
        )
        try:
            while not complete_one_token(port):
                if process.poll() is not None:
                    raise SystemExit(f"{server.name} exited with {process.returncode} while starting; see {log}")
                if time.perf_counter() - begin > server.start_timeout_s:
                    raise SystemExit(
                        f"{server.name} did not become ready within {server.start_timeout_s:g} s; see {log}"
                    )
                time.sleep(0.05)
            yield port, process.pid, time.perf_counter() - begin
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL for the session's process group."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure(args: argparse.Namespace, port: int, row: Row, seed: int) -> dict[str, Any]:
    """One row through the client; its JSON."""
    flags = row.quick if args.quick and row.quick else row.flags
    command = [sys.executable, str(args.client), "--base-url", f"http://127.0.0.1:{port}/v1", "--model", MODEL, *flags]
    command += [
        "--tokenizer",
        str(args.model_dir),
        "--extra-body",
        '{"ignore_eos":true}',
        "--seed",
        str(seed),
        "--compact",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise SystemExit(f"the client failed: {done.stderr[-2000:]}") from None
    return result


def figures(row: Row, result: dict[str, Any]) -> dict[str, float]:
    """What the summary shows of a row: higher ``tok_s`` is better, lower everything else."""
    ttft = (result["ttft_ms"] or {}).get("p50", float("nan"))
    errors = {"errors": float(result["errors"])}
    if row.name == "shared":
        return {"wall_s": result["wall_s"], "ttft_p50_ms": ttft, **errors}
    if row.name.startswith("prefill"):
        return {"input_tok_s": result["input_tok_s"] or float("nan"), "ttft_p50_ms": ttft, **errors}
    return {
        "output_tok_s": result["output_tok_s"],
        "ttft_p50_ms": ttft,
        "tpot_p50_ms": (result["tpot_ms"] or {}).get("p50", float("nan")),
        **errors,
    }


def run_round(args: argparse.Namespace, number: int, found: list[Server]) -> dict[str, dict[str, float]]:
    """All servers once; figures by ``server`` and ``row.figure``. The order turns with the round, so that drift hits nobody always."""
    results: dict[str, dict[str, float]] = {}
    shift = number % len(found)
    for server in found[shift:] + found[:shift]:
        log = args.logs / f"{server.name}-{number}.log"
        with running(server, log) as (port, pid, ready_s):
            time.sleep(1)
            values = {"ready_s": ready_s, "idle_pss_mb": pss_mb(pid)}
            for row in ROWS:
                if args.rows and row.name not in args.rows:
                    continue
                part = figures(row, measure(args, port, row, seed=1 + number))
                values |= {f"{row.name}.{key}": value for key, value in part.items()}
                print(f"  round {number + 1} {server.name:16} {row.name:12} {part}", file=sys.stderr, flush=True)
            values["loaded_pss_mb"] = pss_mb(pid)
        results[server.name] = values
    return results


def summarize(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Median over rounds of every figure, by server; errors are added up."""
    summary: dict[str, dict[str, float]] = {}
    for name in rounds[0]:
        keys = rounds[0][name]
        summary[name] = {
            key: round((sum if key.endswith("errors") else statistics.median)([r[name][key] for r in rounds]), 2)
            for key in keys
        }
    return summary


def verdicts(summary: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Each target: our figure against the best peer's. ``gain`` is above 1 where ours is better."""
    targets = {"c1.output_tok_s": 0.95, "c8.output_tok_s": 1.1, "c32.output_tok_s": 1.1, "shared.wall_s": 1.3}
    targets |= {f"c{n}.ttft_p50_ms": 1.0 for n in (1, 8, 32)}
    peers = {name: values for name, values in summary.items() if not name.startswith("tokenspeed")}
    found = []
    for key, target in targets.items():
        ours = summary["tokenspeed"].get(key)
        theirs = {name: values[key] for name, values in peers.items() if key in values}
        if ours is None or not theirs:
            continue
        higher = key.endswith("tok_s")
        best = (max if higher else min)(theirs, key=lambda name: theirs[name])
        gain = ours / theirs[best] if higher else theirs[best] / ours
        found.append(
            {
                "figure": key,
                "ours": ours,
                "best_peer": best,
                "theirs": theirs[best],
                "gain": round(gain, 3),
                "target": target,
                "met": gain >= target,
            }
        )
    for key, limit in (("ready_s", 8.0), ("idle_pss_mb", 1500.0)):
        ours = summary["tokenspeed"][key]
        found.append(
            {
                "figure": key,
                "ours": ours,
                "best_peer": "limit",
                "theirs": limit,
                "gain": round(limit / ours, 3),
                "target": 1.0,
                "met": ours <= limit,
            }
        )
    return found


def print_tables(summary: dict[str, dict[str, float]], judged: list[dict[str, Any]]) -> None:
    names = list(summary)
    print(f"{'figure':24}" + "".join(f"{name:>18}" for name in names))
    for key in summary[names[0]]:
        print(f"{key:24}" + "".join(f"{summary[name].get(key, float('nan')):>18,.2f}" for name in names))
    print(f"\n{'target':24}{'ours':>12}{'best peer':>14}{'theirs':>12}{'gain':>8}{'wanted':>8}")
    for row in judged:
        mark = "ok" if row["met"] else "MISSED"
        print(
            f"{row['figure']:24}{row['ours']:>12,.2f}{row['best_peer']:>14}{row['theirs']:>12,.2f}{row['gain']:>8.2f}{row['target']:>8.2f}  {mark}"
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--client", type=Path, required=True, help="load client: prints one JSON object (see benchmarks/README.md)"
    )
    parser.add_argument(
        "--model-dir", type=Path, required=True, help="Hugging Face directory with fp32 safetensors and tokenizer.json"
    )
    parser.add_argument("--gguf", type=Path, help="the same weights as an f32 GGUF file, for llama.cpp")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--vllm", type=Path, help="the vllm command of its own environment")
    parser.add_argument("--bf16", action="store_true", help="also measure our server in bfloat16")
    parser.add_argument("--ours-flags", default="", help="further flags of `tokenspeed serve`, one string")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", choices=[row.name for row in ROWS], help="only these rows")
    parser.add_argument("--quick", action="store_true", help="fewer requests; for trying things out")
    parser.add_argument("--logs", type=Path, default=Path("build/bench"), help="where servers log to")
    parser.add_argument("--json", type=Path, help="write rounds, medians and verdicts to this file")
    args = parser.parse_args()
    if args.llama_server and not args.gguf:
        parser.error("--llama-server needs --gguf")
    return args


def main() -> int:
    args = parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    found = servers(args)
    rounds = [run_round(args, number, found) for number in range(args.rounds)]
    summary = summarize(rounds)
    judged = verdicts(summary)
    print_tables(summary, judged)
    if args.json:
        args.json.write_text(json.dumps({"rounds": rounds, "median": summary, "targets": judged}, indent=2) + "\n")
    return 0 if all(row["met"] for row in judged) else 1


if __name__ == "__main__":
    sys.exit(main())

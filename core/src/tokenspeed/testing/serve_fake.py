"""``python -m tokenspeed.testing.serve_fake``: a whole server process with a scripted engine in a process of its own, for tests of signals and crashes.

Every request gets the token 97 for ever, one each ``--step-ms``. Prints one line of JSON with ports and the engine's pid when ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenspeed.config import ServingConfig
from tokenspeed.errors import ConfigError
from tokenspeed.serving.async_llm import AsyncLLM
from tokenspeed.serving.context import ServerContext
from tokenspeed.serving.engine_client import EngineClient
from tokenspeed.serving.server import run_server
from tokenspeed.serving.sockets import bind_sockets
from tokenspeed.testing.byte_tokenizer import ByteTokenizer
from tokenspeed.testing.fake_engine import FakeEngine, Reply, default_info

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--drain-timeout-s", type=float, default=60.0)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--hung-after-s", type=float, default=5.0)
    parser.add_argument("--give-up-after-s", type=float, default=30.0)
    parser.add_argument("--fail", default="", help="what the engine fails with instead of becoming ready")
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run the server, or with ``--engine`` the engine in the folder given."""
    args = _parser().parse_args()
    if args.engine:
        asyncio.run(_engine(Path(args.engine), args))
        return 0
    logging.basicConfig(level=logging.INFO)
    config = ServingConfig(port=args.port, drain_timeout_s=args.drain_timeout_s)
    try:
        sockets = bind_sockets(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            __spec__.name,
            "--engine",
            folder,
            "--step-ms",
            str(args.step_ms),
            "--fail",
            args.fail,
        ]
        engine = subprocess.Popen(command, start_new_session=True)
        client = EngineClient(
            f"ipc://{folder}/to",
            f"ipc://{folder}/from",
            [os.pidfd_open(engine.pid)],
            hung_after_s=args.hung_after_s,
            give_up_after_s=args.give_up_after_s,
            heartbeat_s=0.2,
            pids=[engine.pid],
        )
        context = ServerContext(llm=AsyncLLM(client, ByteTokenizer()), config=config, model_names=("fake",))
        hello = {"port": sockets.port, "control_port": sockets.control_port, "engine": engine.pid}
        code = run_server(context, sockets, on_ready=lambda: print(json.dumps(hello), flush=True))
        try:
            engine.wait(2)
        except subprocess.TimeoutExpired:
            engine.kill()
            engine.wait()
    return code


async def _engine(folder: Path, args: argparse.Namespace) -> None:
    parent = os.getppid()
    info = default_info(max_model_len=100_000)
    engine = FakeEngine(
        lambda _: Reply(tokens=[97] * 100_000, finish=None), info=info, step_s=args.step_ms / 1e3, folder=folder
    )
    await engine.start(ready=not args.fail)
    if args.fail:
        await engine.fail(args.fail)
        await asyncio.sleep(0.1)
    while not args.fail and os.getppid() == parent and "shutdown" not in engine.control:
        await asyncio.sleep(0.05)
    await engine.close()


if __name__ == "__main__":
    sys.exit(main())

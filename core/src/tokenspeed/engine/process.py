"""One rank's process: bootstrap, load, report, serve."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import BinaryIO

from tokenspeed.engine.lifeline import Lifeline
from tokenspeed.engine.memory import out_of_memory
from tokenspeed.engine.start import EngineStart, read_start, write_failure
from tokenspeed.errors import ConfigError, ModelError, PluginError, TokenSpeedError
from tokenspeed.messages import EngineFailed

__all__ = ["engine_main", "failure_of", "main"]

_log = logging.getLogger(__name__)

#: How long rank 0 waits for the other ranks to end after it told them to.
_FAREWELL_S = 5.0


def main(stdin: BinaryIO) -> int:
    """Read the orders from ``stdin`` and carry them out; the exit status."""
    # A terminal sends SIGINT to the whole group. The server decides when the engine ends: by a control request, or by ending itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        start = read_start(stdin)
    except EOFError as error:
        sys.stderr.write(f"engine: {error}\n")
        return 1
    logging.basicConfig(
        level=start.log_level, format=f"%(asctime)s %(levelname)s engine[{start.rank}] %(name)s: %(message)s"
    )
    holders = {stdin.fileno(): "the server process"}
    holders.update({fd: _rank_name(rank) for fd, rank in start.peers.items()})
    return engine_main(start, Lifeline(holders, Path(start.directory)))


def engine_main(start: EngineStart, lifeline: Lifeline) -> int:
    """Run one rank until the engine is told to end; the exit status. A failure is reported to the launcher and, from rank 0, to the server."""
    began_s = time.monotonic()
    channel = None
    try:
        if start.rank == 0:
            # The server connects while the model loads; importing torch comes later.
            from tokenspeed.engine.channel import ZmqChannel

            channel = ZmqChannel(start.address("to-engine"), start.address("from-engine"))
        from tokenspeed.engine.serve_rank import serve_rank

        serve_rank(start, channel, lifeline, began_s)
        if start.rank == 0:
            for rank in start.peers.values():
                lifeline.wait(_rank_name(rank), _FAREWELL_S)
        status = 0
    except BaseException as error:
        failure = failure_of(error)
        if failure.kind == "internal":
            traceback.print_exc()
        _log.error("The engine failed: %s", failure.error)
        write_failure(start.report, failure)
        if channel is not None:
            channel.send_last(failure)
        status = 1
    if channel is not None:
        channel.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        # Threads of a broken step (a collective, a thread pool) must not keep the process.
        os._exit(status)
    return status


def failure_of(error: BaseException) -> EngineFailed:
    """``error`` as the server is told of it."""
    kinds: tuple[tuple[type[TokenSpeedError], str], ...] = (
        (ConfigError, "config"),
        (PluginError, "plugin"),
        (ModelError, "model"),
    )
    for kind, name in kinds:
        if isinstance(error, kind):
            return EngineFailed(name, str(error))
    if isinstance(error, TokenSpeedError):
        return EngineFailed("internal", str(error))
    text = f"{type(error).__name__}: {error}"
    if cause := out_of_memory(error):
        advice = "lower --gpu-memory-utilization, --max-num-seqs or --chunked-prefill-size"
        return EngineFailed("internal", f"memory ran out ({cause}): {advice}; {text}")
    return EngineFailed("internal", text)


def _rank_name(rank: int) -> str:
    return f"engine rank {rank}"

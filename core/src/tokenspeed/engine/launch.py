"""Starts the engine's processes and keeps hold of them. Only the command line and tests call this; imports no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tokenspeed.engine.lifeline import EXIT_ORPHANED
from tokenspeed.engine.start import EngineStart, read_failure, write_start
from tokenspeed.messages import EngineFailed

if TYPE_CHECKING:
    from tokenspeed.engine.assembly import Assembly

__all__ = ["EngineHandle", "launch"]


@dataclass(kw_only=True)
class EngineHandle:
    """Running engine processes, one per rank.

    They end when this process does, however it does; ``close`` ends them earlier.

    Attributes:
        to_engine: address of rank 0's PULL socket.
        from_engine: address of rank 0's PUSH socket; its first message is ``EngineReady`` or ``EngineFailed``.
        sentinels: per rank a file descriptor that becomes readable when the process has ended.
    """

    to_engine: str
    from_engine: str
    processes: Sequence[subprocess.Popen[bytes]]
    sentinels: Sequence[int]
    directory: Path
    _closed: bool = field(default=False, repr=False)
    _last_words: dict[int, EngineFailed | None] = field(default_factory=dict, repr=False)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self.processes]

    def poll(self) -> EngineFailed | None:
        """Whether a rank has ended: its own last word where it had one, else how it ended. Never blocks."""
        for rank, process in enumerate(self.processes):
            if process.poll() is not None and rank not in self._last_words:
                self._last_words[rank] = None if self._closed else read_failure(self.sentinels[rank])
        spoken = [failure for failure in self._last_words.values() if failure is not None]
        if spoken:
            return spoken[0]
        # Of several ranks the one that was struck down comes before those that only followed.
        ended = sorted((self.processes[rank].returncode == EXIT_ORPHANED, rank) for rank in self._last_words)
        for _, rank in ended:
            status = self.processes[rank].returncode
            if status:
                return EngineFailed(
                    "internal", f"engine rank {rank} (process {self.processes[rank].pid}) {_how(status)}"
                )
        return EngineFailed("internal", "the engine has ended") if ended else None

    def wait(self, timeout_s: float) -> bool:
        """Wait until every process has ended by itself; false when time ran out."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                return False
        return True

    def kill(self) -> None:
        """End every process now: what it would still say or finish is for nobody."""
        for process in self.processes:
            process.kill()

    def close(self, timeout_s: float = 5.0) -> None:
        """End what still runs: closing the pipes ends the processes, and those that do not follow in time are killed."""
        if self._closed:
            return
        self._closed = True
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        if not self.wait(timeout_s):
            for process in self.processes:
                process.kill()
                process.wait()
        for sentinel in self.sentinels:
            os.close(sentinel)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> EngineHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def launch(assembly: Assembly, *, log_level: str = "INFO") -> EngineHandle:
    """Start one process per rank of ``assembly.config.parallel``; returns before they are ready.

    Args:
        assembly: its configuration and frozen plan go to each process, which checks the plan against what it finds.
        log_level: name of a level of ``logging`` for the engine's processes.
    """
    config, plan = assembly.config, assembly.plan.encode()
    world_size = config.parallel.world_size
    directory = Path(tempfile.mkdtemp(prefix="tokenspeed-"))  # mode 0700
    peers = [os.pipe() for _ in range(world_size)]
    reports = [os.pipe() for _ in range(world_size)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            others = {peers[other][0]: other for other in range(world_size) if other != rank}
            process = subprocess.Popen(
                [sys.executable, "-m", "tokenspeed.engine"],
                stdin=subprocess.PIPE,
                # Its own end of its pipe stays open in it until it dies, which is what the others watch.
                pass_fds=[*others, peers[rank][1], reports[rank][1]],
            )
            processes.append(process)
            start = EngineStart(
                config=config,
                plan=plan,
                rank=rank,
                world_size=world_size,
                directory=str(directory),
                peers=others,
                report=reports[rank][1],
                log_level=log_level,
            )
            assert process.stdin is not None
            write_start(process.stdin, start)
    except BaseException:
        for process in processes:
            process.kill()
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        for fd in (*(end for pipe in peers for end in pipe), *(write for _, write in reports)):
            os.close(fd)
    return EngineHandle(
        to_engine=f"ipc://{directory}/to-engine",
        from_engine=f"ipc://{directory}/from-engine",
        processes=processes,
        sentinels=[read for read, _ in reports],
        directory=directory,
    )


def _how(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

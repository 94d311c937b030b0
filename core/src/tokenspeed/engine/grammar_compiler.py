"""Compiles grammars off the loop: a queue, a thread, and a child process that is killed where it takes too long."""

from __future__ import annotations

import heapq
import logging
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread

import msgspec

from tokenspeed.engine.grammar_worker import CompileJob, CompileReply, WorkerStart, read_frame, write_frame
from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.grammar import GrammarRequest

__all__ = ["Compiled", "GrammarCompiler"]

_log = logging.getLogger(__name__)

#: Grammars that wait for the process at most, and characters of theirs: a batch of a thousand schemas is served, and memory stays bounded.
#: How long each one waits is bounded where requests wait (``Grammars``).
_MAX_QUEUE, _MAX_QUEUED_CHARS = 4096, 64 << 20
#: How long the process may take to import the backend and read the vocabulary.
_START_S = 300.0
#: How long a grammar waits for a process that starts at leisure; then another one takes its place, which starts at once.
_HURRY_S = 2.0
#: Wall time beside which a compilation's processor time counts: on a machine that is busy with its engine the process hardly runs.
_PATIENCE = 12.0
#: Characters of a grammar that count as much as having come a second later: who queues long ones does not hold up everybody's short ones.
_CHARS_A_SECOND = 4096
_LOOK_S = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What became of one grammar: ``data``, or ``error``. ``lasting`` errors are the grammar's own and come again; ``seconds`` in the process."""

    key: bytes
    data: bytes = b""
    error: GrammarError | None = None
    lasting: bool = False
    seconds: float = 0.0


class GrammarCompiler:
    """One child process for all grammars, started by ``begin`` or with the first one, and again after it died.

    Args:
        start: what the process makes its backend from.
        prepare: called in the thread with key and bytes of each result, so that what it costs to read them is not the loop's.
        command: another process than ``grammar_worker``.
        max_queue, max_chars: grammars that wait for the process at most, and characters of theirs.
    """

    def __init__(
        self,
        start: WorkerStart,
        *,
        prepare: Callable[[bytes, bytes], object],
        command: Sequence[str] = (sys.executable, "-m", "tokenspeed.engine.grammar_worker"),
        max_queue: int = _MAX_QUEUE,
        max_chars: int = _MAX_QUEUED_CHARS,
    ) -> None:
        self._start = start
        self._prepare = prepare
        self._command = list(command)
        self._max_queue, self._max_chars = max_queue, max_chars
        #: what waits, and in which order; an entry of the order whose grammar was withdrawn is passed over
        self._jobs: dict[bytes, tuple[float, GrammarRequest]] = {}
        self._order: list[tuple[float, bytes]] = []
        self._queued_chars = 0
        self._done: deque[Compiled] = deque()
        self._changed = Condition()
        self._closed = False
        self._early = False  # the process is to be started before there is a grammar
        self._thread: Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id; ``None`` where none runs."""
        return self._process.pid if self._process is not None else None

    def begin(self) -> None:
        """Start the process, at leisure and at the lowest priority, so that the first grammar finds it there. Does not wait.

        Where it fails the log says so, and the first grammar starts another one.
        """
        with self._changed:
            self._early = True
            self._ensure_thread()
            self._changed.notify_all()

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="grammar compiler", daemon=True)
            self._thread.start()

    def submit(self, key: bytes, request: GrammarRequest) -> None:
        """Queue a grammar that does not stand in the queue.

        Raises:
            GrammarError: too many wait (status 503).
        """
        with self._changed:
            if len(self._jobs) >= self._max_queue or self._queued_chars + len(request.value) > self._max_chars:
                text = f"{len(self._jobs)} grammars of {self._queued_chars} characters wait to be compiled; try again later"
                raise GrammarError(text, param="grammar", status=503)
            turn = time.monotonic() + len(request.value) / _CHARS_A_SECOND
            self._jobs[key] = turn, request
            heapq.heappush(self._order, (turn, key))
            self._queued_chars += len(request.value)
            self._ensure_thread()
            self._changed.notify_all()

    def withdraw(self, key: bytes) -> None:
        """Nobody waits for ``key`` any more: leave it out where it has not begun."""
        with self._changed:
            if (job := self._jobs.pop(key, None)) is not None:
                self._queued_chars -= len(job[1].value)
            if not self._jobs:
                self._order.clear()

    def results(self) -> list[Compiled]:
        """What has ended since the last call; does not wait."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def wait(self, timeout_s: float) -> None:
        """Wait until something has ended."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._done) or self._closed, timeout_s)

    def close(self) -> None:
        """End the process and the thread; grammars that still wait get no answer."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._order.clear()
            self._queued_chars = 0
            process = self._process
            if process is not None:
                process.kill()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._end()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._early or self._closed)
                if self._closed:
                    return
                early, self._early = self._early and not self._jobs, False
                if not early:
                    key, request = self._next()
            if early:
                self._start_early()
                continue
            began = time.monotonic()
            try:
                data = self._compile(request)
                self._prepare(key, data)
                result = Compiled(key=key, data=data, seconds=time.monotonic() - began)
            except _RefusedError as error:
                result = Compiled(key=key, error=error, lasting=True, seconds=time.monotonic() - began)
            except GrammarError as error:
                result = Compiled(key=key, error=error, seconds=time.monotonic() - began)
            except Exception as error:  # reading what was compiled: the engine goes on
                text = f"the compiled grammar cannot be read: {type(error).__name__}: {error}"
                result = Compiled(key=key, error=GrammarError(text, status=503), seconds=time.monotonic() - began)
            with self._changed:
                self._done.append(result)
                self._changed.notify_all()

    def _start_early(self) -> None:
        try:
            self._running(leisurely=True)
        except GrammarError as error:
            if not (self._closed or self._jobs):
                _log.warning("%s; the first grammar starts it again", error.message[0].upper() + error.message[1:])

    def _next(self) -> tuple[bytes, GrammarRequest]:
        """Take the first out of the queue, which is not empty."""
        while True:
            turn, key = heapq.heappop(self._order)
            if key in self._jobs and self._jobs[key][0] == turn:
                request = self._jobs.pop(key)[1]
                self._queued_chars -= len(request.value)
                return key, request

    def _compile(self, request: GrammarRequest) -> bytes:
        """Ask the process; raises ``GrammarError``."""
        process = self._running()
        assert process.stdin is not None, "it was started with pipes"
        try:
            write_frame(process.stdin, CompileJob(request.kind, request.value))
        except OSError:
            raise self._death(process) from None
        limit = self._start.compile_s
        try:
            reply = self._reply(process, limit, limit * _PATIENCE)
        except _OutOfTimeError:
            reply = None
        if reply is None:
            self._end()
            raise _RefusedError(f"the grammar takes longer than {limit:g} s to compile; make it smaller")
        if reply.error:
            what = "cannot be compiled" if reply.internal else "cannot be used"
            raise _RefusedError(f"the grammar {what}: {reply.error}")
        return reply.compiled

    def _running(self, *, leisurely: bool = False) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with self._changed:
            if self._closed:
                raise GrammarError("the engine ends", status=503)
            try:
                process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    # Signals of a terminal stay away, and its low priority counts against the engine: in a session of its own Linux would schedule it as
                    # an equal of the engine's whole session.
                    process_group=0,
                )
            except OSError as error:
                raise GrammarError(
                    f"the process that compiles grammars cannot be started: {error}", status=503
                ) from error
            self._process = process
        assert process.stdin is not None, "it was started with pipes"
        try:
            write_frame(process.stdin, msgspec.structs.replace(self._start, leisurely=leisurely))
        except OSError:
            raise self._death(process) from None
        if self._reply(process, _START_S, math.inf if leisurely else _START_S, gives_way=leisurely) is None:
            self._end()
            raise GrammarError(f"the process that compiles grammars was not ready after {_START_S:g} s", status=503)
        return process

    def _reply(
        self, process: subprocess.Popen[bytes], limit_s: float, patience_s: float, *, gives_way: bool = False
    ) -> CompileReply | None:
        """The next reply; ``None`` past so much processor time.

        Args:
            gives_way: a grammar that waits for ``_HURRY_S`` ends the process.

        Raises:
            GrammarError: no fault of the grammar (status 503): the process dies, is stopped, gives way, or has not taken that time after ``patience_s``.
        """
        assert process.stdout is not None, "it was started with pipes"
        waited_since = math.inf
        began_s, began_cpu = time.monotonic(), _cpu_seconds(process.pid)
        while not select.select([process.stdout], [], [], _LOOK_S)[0]:
            wall_s = time.monotonic() - began_s
            cpu_s = _cpu_seconds(process.pid) - began_cpu if began_cpu >= 0 else wall_s
            if cpu_s > limit_s:
                return None
            if gives_way and self._jobs:
                waited_since = min(waited_since, wall_s)
                if wall_s - waited_since > _HURRY_S:
                    self._end()
                    raise GrammarError("the process that compiles grammars starts too slowly", status=503)
            stopped = wall_s > limit_s and _state(process.pid) in ("T", "t")
            if stopped or wall_s > patience_s:
                self._end()
                what = (
                    "is stopped" if stopped else f"does not get on: {cpu_s:.3g} s of processor time in {wall_s:.3g} s"
                )
                raise GrammarError(f"the process that compiles grammars {what}; try again later", status=503)
        frame = read_frame(process.stdout)
        if not frame:
            raise self._death(process)
        try:
            return msgspec.msgpack.decode(frame, type=CompileReply)
        except msgspec.DecodeError as error:
            self._end()  # what else it sends is out of step
            text = f"the process that compiles grammars sent what is no answer: {error}; try again"
            raise GrammarError(text, status=503) from error

    def _death(self, process: subprocess.Popen[bytes]) -> GrammarError:
        status = process.wait()
        self._end()
        if status == -signal.SIGXCPU:
            return _OutOfTimeError("its time was over")
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return GrammarError(f"the process that compiles grammars {how}; the engine goes on, try again", status=503)

    def _end(self) -> None:
        """Kill the process and forget it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # bytes that could not be sent
                    continue


class _OutOfTimeError(GrammarError):
    """The process ended itself past its time."""


class _RefusedError(GrammarError):
    """The grammar's own fault."""


def _stat(pid: int) -> list[str]:
    """What Linux tells of a process from its state on; nothing elsewhere."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    """``T`` for a process that a signal has stopped, ``t`` for one that a debugger has; empty where the system does not tell."""
    return next(iter(_stat(pid)), "")


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process, all its threads; -1 where the system does not tell."""
    try:
        fields = _stat(pid)
        return (int(fields[11]) + int(fields[12])) / _TICKS
    except (ValueError, IndexError):
        return -1.0

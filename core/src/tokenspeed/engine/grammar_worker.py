"""The process that compiles grammars: a loop over its standard input, at the lowest priority, within bounds of processor time and memory.

It can be killed at any moment. What it is asked next goes to another one.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread, get_native_id
from typing import IO

import msgspec

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.grammar import GrammarBackend, GrammarContext, GrammarLimits, GrammarRequest
from tokenspeed.plugins.selection import load_target

__all__ = ["CompileJob", "CompileReply", "WorkerStart", "backend_from", "read_frame", "write_frame"]

_LENGTH = struct.Struct("<Q")
_NICE, _LEISURE_NICE = 5, 19
#: How often to look whether the engine lives.
_WATCH_S = 0.5
#: Address space that compiling may take beside what the process had when it was ready.
_MEMORY_BYTES = 4 << 30


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame: which backend to make, and of what; fields as in ``GrammarContext``.

    Attributes:
        leisurely: nobody waits for the backend: make it with what processor time others leave.
    """

    target: str
    vocabulary: list[bytes]
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    special_token_ids: dict[str, int]
    options: dict[str, str | int | float | bool | None]
    value_bytes: int
    compiled_bytes: int
    compile_s: float
    leisurely: bool = False


class CompileJob(msgspec.Struct, array_like=True, frozen=True):
    """One grammar to compile; fields as in ``GrammarRequest``."""

    kind: str
    value: str


class CompileReply(msgspec.Struct, array_like=True, frozen=True):
    """The answer to one grammar: ``compiled``, or ``error`` (with ``internal`` set where the backend broke instead of refusing). The first one says that the
    process is ready."""

    compiled: bytes = b""
    error: str = ""
    internal: bool = False


def backend_from(start: WorkerStart) -> GrammarBackend:
    """The backend that ``start`` describes."""
    backend: GrammarBackend = load_target(start.target)(
        GrammarContext(
            vocabulary=start.vocabulary,
            vocab_size=start.vocab_size,
            stop_token_ids=start.stop_token_ids,
            special_token_ids=start.special_token_ids,
            limits=GrammarLimits(
                value_bytes=start.value_bytes, compiled_bytes=start.compiled_bytes, compile_s=start.compile_s
            ),
            options=start.options,
        )
    )
    return backend


def write_frame(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Send one message."""
    frame = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(frame)) + frame)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes:
    """One frame; empty at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return b""
    (size,) = _LENGTH.unpack(head)
    frame = stream.read(size)
    return frame if len(frame) == size else b""


def main() -> int:
    """Serve until the engine closes the pipe."""
    with contextlib.suppress(OSError):
        os.nice(max(0, _NICE - os.getpriority(os.PRIO_PROCESS, 0)))
    Thread(target=_watch, args=(os.getppid(),), name="orphan watch", daemon=True).start()
    # Whatever a library prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    questions = sys.stdin.buffer
    frame = read_frame(questions)
    if not frame:
        return 0
    start = msgspec.msgpack.decode(frame, type=WorkerStart)
    backend = _backend_at_leisure(start) if start.leisurely else backend_from(start)
    _limit_memory()
    write_frame(answers, CompileReply())
    while frame := read_frame(questions):
        job = msgspec.msgpack.decode(frame, type=CompileJob)
        _limit_seconds(start.compile_s)
        write_frame(answers, _compile(backend, GrammarRequest(kind=job.kind, value=job.value)))
    return 0


def _backend_at_leisure(start: WorkerStart) -> GrammarBackend:
    """``backend_from`` in a thread of the lowest priority. Linux keeps one for each thread, and nothing could raise the process's own again."""

    def make() -> GrammarBackend:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, get_native_id(), _LEISURE_NICE)
        return backend_from(start)

    with ThreadPoolExecutor(1, thread_name_prefix="backend") as thread:
        return thread.submit(make).result()


def _compile(backend: GrammarBackend, request: GrammarRequest) -> CompileReply:
    limit = backend.ctx.limits.compiled_bytes
    try:
        data = backend.serialize(backend.compile(request))
    except GrammarError as error:
        return CompileReply(error=error.message)
    except (MemoryError, RecursionError) as error:
        return CompileReply(error=f"it takes too much memory to compile ({type(error).__name__}); make it smaller")
    except Exception as error:  # a library's own error about a grammar that it cannot take
        return CompileReply(error=f"{type(error).__name__}: {error}", internal=True)
    if len(data) > limit:
        return CompileReply(
            error=f"it is too large: {len(data)} bytes when compiled, {limit} are allowed; make it smaller"
        )
    return CompileReply(compiled=data)


def _watch(engine: int) -> None:
    """End in the midst of a grammar where the engine is gone; between two of them the pipe's end says so."""
    while os.getppid() == engine:
        time.sleep(_WATCH_S)
    os._exit(1)


def _limit_memory() -> None:
    """Bound the address space by what is in use now and what a grammar may take."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _limit_seconds(seconds: float) -> None:
    """Have the kernel end this process past its time, should a library hold on to it and nobody else be left to do so."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    with contextlib.suppress(OSError, ValueError):  # the engine kills it past its time all the same
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


if __name__ == "__main__":
    sys.exit(main())

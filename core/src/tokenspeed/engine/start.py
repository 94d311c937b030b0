"""What the launcher tells an engine process, and what the process says last if it fails."""

from __future__ import annotations

import os
import struct
from typing import IO

import msgspec

from tokenspeed.config import EngineConfig
from tokenspeed.messages import EngineFailed

__all__ = ["EngineStart", "read_failure", "read_start", "write_failure", "write_start"]

_LENGTH = struct.Struct("<Q")
_MAX_REPORT = 60_000  # fits a pipe's buffer, so that writing it never waits for a reader


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start of one rank, sent over its standard input, which stays open as long as the launcher lives.

    Attributes:
        plan: the frozen plugin plan as JSON.
        directory: private directory (mode 0700) of this engine's sockets and rendezvous files.
        peers: file descriptor to rank: pipe ends that close when that rank dies.
        report: file descriptor for a last ``EngineFailed``; its other end is the launcher's sentinel.
        log_level: name of a level of ``logging``.
    """

    config: EngineConfig
    plan: bytes
    rank: int
    world_size: int
    directory: str
    peers: dict[int, int]
    report: int
    log_level: str = "INFO"

    def address(self, name: str) -> str:
        """ZeroMQ address of socket ``name``."""
        return f"ipc://{self.directory}/{name}"


def write_start(stream: IO[bytes], start: EngineStart) -> None:
    """Send ``start``; the stream stays open."""
    frame = msgspec.msgpack.encode(start)
    stream.write(_LENGTH.pack(len(frame)) + frame)
    stream.flush()


def read_start(stream: IO[bytes]) -> EngineStart:
    """Receive what ``write_start`` sent.

    Raises:
        EOFError: the launcher ended before it had sent everything.
    """
    head = stream.read(_LENGTH.size)
    if len(head) == _LENGTH.size:
        (size,) = _LENGTH.unpack(head)
        frame = stream.read(size)
        if len(frame) == size:
            return msgspec.msgpack.decode(frame, type=EngineStart)
    raise EOFError("the launcher ended before it had sent the start message")


def write_failure(fd: int, failure: EngineFailed) -> None:
    """Leave ``failure`` for the launcher to read when it finds this process gone."""
    text = failure.error
    while len(frame := msgspec.msgpack.encode(EngineFailed(failure.kind, text))) > _MAX_REPORT:
        text = text[: len(text) // 2]
    os.write(fd, frame)


def read_failure(fd: int) -> EngineFailed | None:
    """What a process that has ended left in its report pipe; ``None`` for nothing."""
    frame = b""
    while piece := os.read(fd, 65536):
        frame += piece
    return msgspec.msgpack.decode(frame, type=EngineFailed) if frame else None

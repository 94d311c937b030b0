"""The engine's end of its conversation with the server: over ZeroMQ between processes, or two queues inside one."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from typing import Protocol

import msgspec
import zmq

from tokenspeed.engine.rate_limit import RateLimitedLog
from tokenspeed.messages import FromEngine, ToEngine, decode_to_engine, encode

__all__ = ["Channel", "LocalChannel", "ZmqChannel"]

_log = logging.getLogger(__name__)

#: Frames taken between two steps at most, so that a flood of messages cannot starve the rows that run.
_FRAMES_PER_STEP = 512
#: A longer frame is refused by the socket before it is read: 32 MiB of request body are 8 Mi token ids at most.
_MAX_FRAME_BYTES = 64 * 1024 * 1024


class Channel(Protocol):
    """Messages in and out, in order."""

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        """What is pending, bounded in number; waits up to ``timeout_s`` for the first message, without limit for ``None``, not at all for 0."""

    def send(self, message: FromEngine) -> None:
        """Queue one message; does not wait for the reader."""


class LocalChannel:
    """Both ends in one process."""

    def __init__(self) -> None:
        self.to_engine: deque[ToEngine] = deque()
        self.from_engine: deque[FromEngine] = deque()

    def receive(self, timeout_s: float | None) -> list[ToEngine]:  # noqa: ARG002  nobody else could fill the queue meanwhile
        """What was put into ``to_engine``."""
        return [self.to_engine.popleft() for _ in range(min(len(self.to_engine), _FRAMES_PER_STEP))]

    def send(self, message: FromEngine) -> None:
        """Append to ``from_engine``."""
        self.from_engine.append(message)


class ZmqChannel:
    """Binds a PULL and a PUSH socket, for a server that connects to both.

    Args:
        to_engine: address to take messages from; an ``ipc://`` path in a directory that only this user can enter.
        from_engine: address to send messages to.
    """

    def __init__(self, to_engine: str, from_engine: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._push = self._context.socket(zmq.PUSH)
        # Without high-water marks: what the server has not read yet is bounded by the requests that it has sent.
        self._pull.setsockopt(zmq.RCVHWM, 0)
        self._push.setsockopt(zmq.SNDHWM, 0)
        self._pull.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        self._pull.bind(to_engine)
        self._push.bind(from_engine)
        #: frames that were no message
        self.bad_frames = 0
        self._bad_log = RateLimitedLog(_log)

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        """See ``Channel``. A frame that does not decode is counted and dropped."""
        messages: list[ToEngine] = []
        if timeout_s != 0 and not self._pull.poll(None if timeout_s is None else int(timeout_s * 1000)):
            return messages
        for _ in range(_FRAMES_PER_STEP):
            try:
                frame = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.append(decode_to_engine(frame))
            except (msgspec.DecodeError, RecursionError) as error:
                self.bad_frames += 1
                self._bad_log.warning("A frame of %d bytes was dropped: %s", len(frame), error)
        return messages

    def send(self, message: FromEngine) -> None:
        """See ``Channel``. Waits only while no server is connected yet."""
        self._push.send(encode(message))

    def send_last(self, message: FromEngine) -> None:
        """``send`` that gives up where no server is connected."""
        with contextlib.suppress(zmq.Again):
            self._push.send(encode(message), zmq.NOBLOCK)

    def close(self, linger_s: float = 1.0) -> None:
        """Send what is queued for at most ``linger_s``, then close."""
        self._pull.close(0)
        self._push.close(int(linger_s * 1000))
        self._context.term()

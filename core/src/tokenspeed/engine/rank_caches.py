"""Cache operations on several ranks: one is complete when every rank has answered, and as good as the worst of them."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import zmq

from tokenspeed.errors import EngineError
from tokenspeed.runtime.cache_executor import CacheExecutor

__all__ = ["Answers", "RankCaches"]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[int, int]])
_WAIT_MS = 1


class Answers:
    """A follower's way to tell rank 0 how its operations ended."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(address)

    def send(self, ended: list[tuple[int, int]]) -> None:
        """Tell of operations."""
        if ended:
            self._socket.send(_encoder.encode(ended))

    def close(self) -> None:
        """Close; what was sent is delivered first where rank 0 still listens."""
        self._socket.close(1000)


class RankCaches:
    """Rank 0's own answers together with those of the other ranks. A ``CacheSource`` of ``engine.tiers``."""

    def __init__(self, own: CacheExecutor, address: str, world_size: int) -> None:
        self._own = own
        self._world_size = world_size
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        #: good pages on the worst rank, and ranks that have answered
        self._partial: dict[int, tuple[int, int]] = {}
        self._complete: dict[int, int] = {}

    @property
    def in_flight(self) -> int:
        """Operations that some rank has not answered, or that were not told of."""
        return max(self._own.in_flight, len(self._partial)) + len(self._complete)

    def finished(self) -> list[tuple[int, int]]:
        """(number, good pages on every rank) of operations that all ranks have answered."""
        self._collect(0)
        complete, self._complete = self._complete, {}
        return list(complete.items())

    def wait(self, numbers: Collection[int]) -> dict[int, int]:
        """Good pages on every rank; waits for all ranks. That one is gone is noticed by ``Lifeline``."""
        while not all(number in self._complete for number in numbers):
            self._collect(_WAIT_MS)
        return {number: self._complete[number] for number in numbers}

    def close(self) -> None:
        """End rank 0's threads and the socket."""
        try:
            self._own.close()
        finally:
            self._socket.close(0)
            self._context.term()

    def _collect(self, wait_ms: int) -> None:
        self._take(self._own.finished())
        while self._socket.poll(wait_ms):
            try:
                self._take(_decoder.decode(self._socket.recv()))
            except msgspec.DecodeError as error:
                raise EngineError(f"a rank sent a frame that tells of no cache operation: {error}") from error
            wait_ms = 0

    def _take(self, ended: list[tuple[int, int]]) -> None:
        for number, pages in ended:
            least, answers = self._partial.pop(number, (pages, 0))
            least, answers = min(least, pages), answers + 1
            if answers == self._world_size:
                self._complete[number] = least
            else:
                self._partial[number] = (least, answers)

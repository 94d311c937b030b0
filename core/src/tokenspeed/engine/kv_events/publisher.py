"""Sends KV events: a PUB socket that never waits for a subscriber, and a ROUTER that sends past batches to who missed them.

One thread owns both sockets. The engine only hands records over, so a step costs it a queue entry.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from tokenspeed.engine.kv_events.batching import Record, events_of
from tokenspeed.engine.kv_events.config import KVEventsConfig
from tokenspeed.engine.kv_events.wire import END, KVEventBatch, encode_batch, number_frame, number_from
from tokenspeed.engine.rate_limit import RateLimitedLog
from tokenspeed.errors import ConfigError

__all__ = ["KVEventPublisher"]

_log = logging.getLogger(__name__)
_WAKE = "inproc://kv-events-wake"

#: How long ``close`` leaves to the last messages.
_LINGER_MS = 1000


class KVEventPublisher:
    """Publishes records in the order in which they are handed over, numbered from 0 without gaps.

    Args:
        config: where to, and how much is kept.
        block_sizes: tokens of a page, per cache group.
        data_parallel_rank: of the replica, told with every batch.
        clock: seconds since the epoch.

    Attributes:
        endpoint, replay_endpoint: where the sockets are: the addresses given, with a port of the system's choice filled in.

    Raises:
        ConfigError: an endpoint cannot be bound or connected to.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        *,
        block_sizes: Sequence[int],
        data_parallel_rank: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._block_sizes = tuple(block_sizes)
        self._rank = data_parallel_rank
        self._clock = clock
        self._topic = config.topic.encode()
        self._records: queue.Queue[tuple[float, Record] | None] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._bad_requests = RateLimitedLog(_log)
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self.endpoint = ""
        self.replay_endpoint: str | None = None
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.sndhwm = config.hwm
            self.endpoint = _attach(self._pub, "endpoint", config.endpoint, bind=_binds(config.endpoint))
            if config.replay_endpoint is not None:
                self._router = self._context.socket(zmq.ROUTER)
                self._router.sndhwm = 0  # a replay is bounded by buffer_steps; a part of it would be of no use
                self.replay_endpoint = _attach(self._router, "replay_endpoint", config.replay_endpoint, bind=True)
            self._woken, self._waker = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
            self._woken.rcvhwm = self._waker.sndhwm = 0  # the queue is the bound
            self._woken.bind(_WAKE)
            self._waker.connect(_WAKE)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, record: Record) -> None:
        """Send ``record`` as one batch, unless it is empty. It must not change any more. One thread at a time.

        Waits where ``max_queue_size`` batches are on their way: an event left out would make every subscriber's tree wrong.
        """
        if len(record.kind):
            self._hand_over((self._clock(), record))

    def close(self) -> None:
        """Send what was handed over, then end. Twice is once."""
        if self._thread.is_alive():
            self._hand_over(None)
            self._thread.join()
        self._context.destroy(linger=_LINGER_MS)

    def _hand_over(self, item: tuple[float, Record] | None) -> None:
        self._records.put(item)
        self._waker.send(b"")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._woken in ready:
                self._woken.recv()
                item = self._records.get()  # as many as there are wake-ups
                if item is None:
                    return
                self._send(*item)
            if self._router is not None and self._router in ready:
                self._replay(self._router, self._router.recv_multipart())

    def _send(self, ts: float, record: Record) -> None:
        payload = encode_batch(KVEventBatch(ts, events_of(record, self._block_sizes), self._rank))
        self._pub.send_multipart((self._topic, number_frame(self._next), payload))
        self._sent.append((self._next, payload))
        self._next += 1

    def _replay(self, router: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """Answer (client, empty, first number wanted). What is no such request is left without an answer."""
        try:
            client, empty, wanted = frames
            first = number_from(wanted)
            if empty:
                raise ValueError("the frame before the number is not empty")
        except ValueError as error:
            self._bad_requests.warning("A replay request with %d frames is ignored: %s", len(frames), error)
            return
        for number, payload in self._sent:
            if number >= first:
                router.send_multipart((client, b"", number_frame(number), payload))
        router.send_multipart((client, b"", END, b""))


def _attach(socket: zmq.Socket[bytes], field: str, address: str, *, bind: bool) -> str:
    try:
        (socket.bind if bind else socket.connect)(address)
    except zmq.ZMQError as error:
        verb = "bound" if bind else "connected to"
        raise ConfigError(f"--kv-events-config: {field} {address} cannot be {verb}: {error}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _binds(address: str) -> bool:
    return address.startswith("ipc://") or "*" in address or "::" in address

"""Sends KV events: a PUB socket that never waits for a subscriber, and a ROUTER that sends past batches to who missed them.

One thread owns both sockets. The engine only hands records over, so a step costs it a queue entry, and nothing that the thread does or suffers holds a step up:
what cannot be sent is dropped, and its number is missing.
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
from tokenspeed.engine.kv_events.config import LOOPBACK, KVEventsConfig, binds
from tokenspeed.engine.kv_events.wire import END, KVEventBatch, encode_batch, number_frame, number_from
from tokenspeed.engine.rate_limit import RateLimitedLog
from tokenspeed.errors import ConfigError

__all__ = ["KVEventPublisher"]

_log = logging.getLogger(__name__)
_WAKE = "inproc://kv-events-wake"

_LARGEST = 2**31 - 1  # that an option of a socket takes
#: How often ``close`` looks whether the thread has failed while it waits for room in the queue.
_LOOK_S = 0.1
#: How long ``close`` leaves to the last messages.
_LINGER_MS = 1000


class KVEventPublisher:
    """Publishes records in the order in which they are handed over, numbered from 0; a number that is missing was dropped.

    Args:
        config: where to, and how much is kept.
        block_sizes: tokens of a page, per cache group.
        data_parallel_rank: of the replica, told with every batch.
        clock: seconds since the epoch.

    Attributes:
        endpoint, replay_endpoint: where the sockets are: the addresses given, with a port of the system's choice filled in.
        dropped: batches that were not sent: the queue was full, or the thread failed.
        replays_cut: replays that a client did not take, or did not wait for.

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
        self._records: queue.Queue[tuple[int, float, Record] | None] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._bad_requests, self._losses = RateLimitedLog(_log), RateLimitedLog(_log)
        self.dropped = self.replays_cut = 0
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self.endpoint = ""
        self.replay_endpoint: str | None = None
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.sndhwm = config.hwm
            bind = config.endpoint is None or binds(config.endpoint)
            self.endpoint = _attach(self._pub, "endpoint", config.endpoint or LOOPBACK, bind=bind)
            if config.replay_endpoint is not None:
                self._router = self._context.socket(zmq.ROUTER)
                # Half of it is room again only when the client has read the other half: a whole replay always fits for who has read the one before it.
                self._router.sndhwm = min(2 * (config.buffer_steps + 1), _LARGEST)
                self._router.router_mandatory = True
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

        Never waits, and raises nothing for what the sending thread does.
        Where ``max_queue_size`` batches are on their way, or the thread has failed, the batch is dropped. Its number is used up, so that subscribers see that
        their trees are wrong and begin again.
        """
        if not len(record.kind):
            return
        number, self._next = self._next, self._next + 1
        if self._thread.is_alive():
            try:
                self._records.put_nowait((number, self._clock(), record))
            except queue.Full:
                self._lost("the queue of %d batches is full", self._records.maxsize)
            else:
                self._waker.send(b"")
        else:
            self._lost("the sending thread has ended")

    def close(self) -> None:
        """Send what was handed over, then end. Twice is once."""
        while self._thread.is_alive():
            try:
                self._records.put(None, timeout=_LOOK_S)
            except queue.Full:
                continue
            self._waker.send(b"")
            self._thread.join()
        self._context.destroy(linger=_LINGER_MS)

    def _lost(self, why: str, *values: object) -> None:
        self.dropped += 1
        self._losses.warning(f"A batch of KV events is dropped, subscribers must begin again: {why}", *values)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            _log.exception("The thread that sends KV events failed; no further ones are sent")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            while self._woken in ready:  # all of them: replays must not hold up what is new
                self._woken.recv()
                item = self._records.get()  # as many as there are wake-ups
                if item is None:
                    return
                self._try_to_send(*item)
                if not self._woken.poll(0):
                    break
            if self._router is not None and self._router in ready:
                self._replay(self._router, self._router.recv_multipart())

    def _try_to_send(self, number: int, ts: float, record: Record) -> None:
        try:
            payload = encode_batch(KVEventBatch(ts, events_of(record, self._block_sizes), self._rank))
            self._pub.send_multipart((self._topic, number_frame(number), payload))
            self._sent.append((number, payload))
        except Exception as error:
            self._lost("%s: %s", type(error).__name__, error)

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
        try:
            for number, payload in self._sent:
                if number >= first:
                    router.send_multipart((client, b"", number_frame(number), payload), zmq.NOBLOCK)
            router.send_multipart((client, b"", END, b""), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.replays_cut += 1
            self._bad_requests.warning("A replay is cut: its client is gone, or has not read the one before it")


def _attach(socket: zmq.Socket[bytes], field: str, address: str, *, bind: bool) -> str:
    try:
        (socket.bind if bind else socket.connect)(address)
    except zmq.ZMQError as error:
        verb = "bound" if bind else "connected to"
        raise ConfigError(f"--kv-events-config: {field} {address} cannot be {verb}: {error}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)

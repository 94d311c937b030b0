"""A subscriber of KV events that recovers what it missed, and the tree that the events rebuild."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import zmq

from tokenspeed.engine.kv_events.wire import (
    END,
    MEDIUMS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    decode_batch,
    number_frame,
    number_from,
)

__all__ = ["KVEventSubscriber", "LostEventsError", "MirroredPage", "PrefixMirror"]


class LostEventsError(Exception):
    """Batches are missing that the publisher no longer has: what was rebuilt is not the publisher's tree any more."""


class KVEventSubscriber:
    """Batches of one publisher, each once and in order.

    Where numbers are missing, also those before the first message received, they are asked for at the replay socket. Tests override ``_receive`` to lose
    messages.

    Args:
        endpoint: of the PUB socket.
        replay_endpoint: of the replay socket; without one a gap raises ``LostEventsError``.
        topic: of the messages to receive; the empty one is every topic.
        timeout_s: the longest wait for a message of a replay.

    Attributes:
        next_number: of the next batch to be taken; all before it were.
        replayed: batches that a replay brought.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, *, topic: str = "", timeout_s: float = 10.0
    ) -> None:
        self.next_number = 0
        self.replayed = 0
        self._timeout_ms = int(timeout_s * 1000)
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.rcvhwm = 0
        self._sub.subscribe(topic.encode())
        self._sub.connect(endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        if replay_endpoint is not None:
            self._replay = self._context.socket(zmq.DEALER)
            self._replay.rcvhwm = 0
            self._replay.connect(replay_endpoint)

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close both sockets."""
        self._context.destroy(linger=0)

    def poll(self, timeout_s: float) -> list[KVEventBatch]:
        """What the next message brings: its batch, those missed before it, or nothing if it was known; nothing where none comes in time.

        Raises:
            LostEventsError: see the class.
        """
        if not self._sub.poll(int(timeout_s * 1000)):
            return []
        message = self._receive()
        if message is None or message[0] < self.next_number:
            return []
        number, payload = message
        batches = self.catch_up() if number > self.next_number else []
        if number == self.next_number:
            batches.append(self._take(payload))
        elif number > self.next_number:
            raise LostEventsError(f"batch {self.next_number} was not received and a replay does not bring it")
        return batches

    def catch_up(self) -> list[KVEventBatch]:
        """Everything published since the last batch taken: also what was lost at the end, where no later message shows the gap."""
        if self._replay is None:
            raise LostEventsError(f"batch {self.next_number} was not received and there is no replay socket")
        self._replay.send_multipart((b"", number_frame(self.next_number)))
        batches: list[KVEventBatch] = []
        while True:
            if not self._replay.poll(self._timeout_ms):
                raise LostEventsError(f"no answer of the replay socket within {self._timeout_ms / 1000:g} s")
            _, frame, payload = self._replay.recv_multipart()
            if frame == END:
                return batches
            if number_from(frame) != self.next_number:
                raise LostEventsError(f"batch {self.next_number} is gone; the oldest one kept is {number_from(frame)}")
            batches.append(self._take(payload))
            self.replayed += 1

    def _receive(self) -> tuple[int, bytes] | None:
        """The next message's number and payload; ``None`` where it is lost."""
        _, number, payload = self._sub.recv_multipart()
        return number_from(number), payload

    def _take(self, payload: bytes) -> KVEventBatch:
        self.next_number += 1
        return decode_batch(payload)


@dataclass(frozen=True, slots=True)
class MirroredPage:
    """A page as the events tell it. ``tokens`` are its own; empty for other tiers than the device's."""

    parent: bytes | None
    tokens: tuple[int, ...]
    lora_id: int | None


@dataclass
class PrefixMirror:
    """The tree of every tier, rebuilt from events. On the device's tier an event that fits no tree is an error: a page whose parent is not there, a page
    stored twice, one removed that is not there or that others stand on. Groups of windows and states are no trees.

    Attributes:
        pages: hash to page, per (medium, cache group).
    """

    pages: dict[tuple[str, int], dict[bytes, MirroredPage]] = field(default_factory=dict)
    _children: dict[tuple[int, bytes], int] = field(default_factory=dict)

    def apply(self, batches: Sequence[KVEventBatch]) -> None:
        """Raises ``ValueError`` naming an event that fits no tree."""
        for batch in batches:
            for event in batch.events:
                self.apply_event(event)

    def apply_event(self, event: Event) -> None:
        """One event; see ``apply``."""
        if isinstance(event, AllBlocksCleared):
            for medium, group in list(self.pages):
                if medium != MEDIUMS[2]:
                    del self.pages[medium, group]
            self._children.clear()
        elif isinstance(event, BlockRemoved):
            for key in event.block_hashes:
                self._remove(event, key)
        else:
            self._store(event)

    def tier(self, medium: str = MEDIUMS[0], group: int = 0) -> dict[bytes, MirroredPage]:
        """Pages by hash."""
        return self.pages.get((medium, group), {})

    def match(self, hashes: Sequence[bytes], medium: str = MEDIUMS[0], group: int = 0) -> int:
        """How many leading pages of a chain are there."""
        tier = self.tier(medium, group)
        return next((depth for depth, key in enumerate(hashes) if key not in tier), len(hashes))

    def _store(self, event: BlockStored) -> None:
        group = event.group_idx or 0
        tier = self.pages.setdefault((event.medium or MEDIUMS[0], group), {})
        # Only full groups' pages on the device, which are told of as group 0, come with tokens and after what they follow.
        device = event.medium == MEDIUMS[0] and not group
        size, parent = event.block_size, event.parent_block_hash
        if len(event.token_ids) != (size * len(event.block_hashes) if device else 0):
            raise ValueError(f"{len(event.token_ids)} tokens for {len(event.block_hashes)} pages of {size}: {event}")
        for index, key in enumerate(event.block_hashes):
            if device:
                if key in tier:
                    raise ValueError(f"page {key.hex()} is stored twice: {event}")
                if parent is not None and parent not in tier:
                    raise ValueError(f"the parent {parent.hex()} is not there: {event}")
                if parent is not None:
                    self._children[group, parent] = self._children.get((group, parent), 0) + 1
            tier[key] = MirroredPage(parent, tuple(event.token_ids[index * size : (index + 1) * size]), event.lora_id)
            parent = key

    def _remove(self, event: BlockRemoved, key: bytes) -> None:
        group = event.group_idx or 0
        page = self.tier(event.medium or MEDIUMS[0], group).get(key)
        if page is None:
            raise ValueError(f"page {key.hex()} is removed and not there: {event}")
        if event.medium == MEDIUMS[0] and not group:
            if self._children.pop((group, key), 0):
                raise ValueError(f"page {key.hex()} is removed and others stand on it: {event}")
            if page.parent is not None:
                self._children[group, page.parent] -= 1
        del self.pages[event.medium or MEDIUMS[0], group][key]

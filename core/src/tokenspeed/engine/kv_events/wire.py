"""The wire form of KV events: MessagePack arrays, each event led by its name. Field order is the protocol.

A message is three frames: topic, sequence number (8 bytes, big-endian, from 0 without gaps), and a ``KVEventBatch``. A replay is asked for with the first
number wanted and answered by (number, batch) messages; ``END`` with an empty batch ends it.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "END",
    "MEDIUMS",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "KVEventBatch",
    "decode_batch",
    "encode_batch",
    "number_frame",
    "number_from",
]

#: Names of the tiers, by the scheduler's number: the device's pool (whatever the device is), the host's, the store.
MEDIUMS = ("GPU", "CPU", "STORAGE")

#: The number that ends a replay: -1.
END = (-1).to_bytes(8, "big", signed=True)


class _Event(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Tagged with the name of its class. Subscribers read fields by their place, and pass over those that they do not know."""


class BlockStored(_Event):
    """Pages that can be reused from now on: a run, each the parent of the next.

    Attributes:
        block_hashes: 16 bytes each.
        parent_block_hash: of the page before the first; ``None`` at the start of a prompt.
        token_ids: of all pages in order; empty for other tiers than the device's, where the hash was told with its tokens before.
        block_size: tokens of a page.
        lora_id: number of the adapter; ``None`` for the base model.
        medium: one of ``MEDIUMS``.
        lora_name: not known here.
        extra_keys: not told: the hash holds them.
        group_idx: cache group, where the model has several.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(_Event):
    """Pages that are gone from ``medium``, in the order in which they went."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """Device and host hold no page any more. What a store holds stays."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of one or more steps, in order of mutation. ``ts``: seconds since the epoch."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KVEventBatch)


def encode_batch(batch: KVEventBatch) -> bytes:
    """The last frame of a message."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> KVEventBatch:
    """Raises ``msgspec.DecodeError`` where ``payload`` is no batch."""
    return _decoder.decode(payload)


def number_frame(number: int) -> bytes:
    """The frame of a sequence number."""
    return number.to_bytes(8, "big")


def number_from(frame: bytes) -> int:
    """The sequence number in ``frame``. Raises ``ValueError`` where it has not 8 bytes."""
    if len(frame) != 8:
        raise ValueError(f"a sequence number has 8 bytes, not {len(frame)}")
    return int.from_bytes(frame, "big")

"""MessagePack encoding of the messages, typed on both ends: a frame that does not decode is refused, never guessed at."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenspeed.messages.from_engine import FromEngine
from tokenspeed.messages.to_engine import ToEngine

__all__ = ["as_named", "decode_from_engine", "decode_to_engine", "encode"]

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The frame of one message."""
    return _encoder.encode(message)


def decode_to_engine(frame: bytes | memoryview) -> ToEngine:
    """A message for the engine. Raises ``msgspec.DecodeError`` (or its ``ValidationError``) for anything else."""
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes | memoryview) -> FromEngine:
    """A message from the engine. Raises ``msgspec.DecodeError`` (or its ``ValidationError``) for anything else."""
    return _from_engine.decode(frame)


def as_named(value: Any) -> Any:
    """``value`` as plain JSON for people: messages within it become objects by the names of their fields, where their own encoding is lists by position."""
    if isinstance(value, msgspec.Struct):
        return {name: as_named(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: as_named(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_named(item) for item in value]
    return value

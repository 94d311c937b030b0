"""Frames: a page of KV with the header that tells whether it is whole, and whose it is."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

from tokenspeed.interfaces.kvstore import Frame, KVNamespace

__all__ = ["HEADER_BYTES", "frame_bytes", "seal", "unseal"]

# magic, version, CRC-32 of what follows it, payload length, namespace digest, page hash; padded so that payloads stay aligned to 64 bytes
_HEADER = struct.Struct("<4sII Q 16s 16s")
_MAGIC = b"TSKV"
_VERSION = 1
_CHECKED_FROM = 12

#: Bytes before the payload.
HEADER_BYTES = 64


def frame_bytes(payload: int) -> int:
    """Length of the frame of ``payload`` bytes."""
    return HEADER_BYTES + payload


def seal(frame: Frame, namespace: KVNamespace, key: bytes, payload: npt.NDArray[np.uint8]) -> None:
    """Write header and payload into ``frame`` of ``frame_bytes(len(payload))``."""
    frame[HEADER_BYTES:] = payload
    head = frame[:HEADER_BYTES].data
    head[_HEADER.size :] = bytes(HEADER_BYTES - _HEADER.size)
    _HEADER.pack_into(head, 0, _MAGIC, _VERSION, 0, len(payload), namespace.digest, key)
    struct.pack_into("<I", head, _CHECKED_FROM - 4, _checksum(frame))


def unseal(frame: Frame, namespace: KVNamespace, key: bytes) -> npt.NDArray[np.uint8] | None:
    """The payload in ``frame``; ``None`` where it is torn, changed, of another length, or of another key."""
    if len(frame) < HEADER_BYTES:
        return None
    magic, version, checksum, length, digest, page = _HEADER.unpack_from(frame.data)
    whole = magic == _MAGIC and version == _VERSION and length == len(frame) - HEADER_BYTES
    if not whole or (digest, page) != (namespace.digest, key) or checksum != _checksum(frame):
        return None
    return frame[HEADER_BYTES:]


def _checksum(frame: Frame) -> int:
    return zlib.crc32(frame.data[_CHECKED_FROM:])

"""The KV store ``memory``: frames in this process, gone with it. What a store must do, in its simplest form."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenspeed.interfaces.kvstore import Frame, KVNamespace, KVStore, KVStoreContext

__all__ = ["MemoryStore"]


@dataclass
class _Frames:
    """(namespace id, key) to frame, least recently used first; everything under ``lock``."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    frames: OrderedDict[tuple[str, bytes], bytes] = field(default_factory=OrderedDict)
    bytes: int = 0


class MemoryStore(KVStore):
    """Objects of one process share their frames. The least recently used ones go when ``memory_store_mb`` is reached."""

    def __init__(self, ctx: KVStoreContext) -> None:
        super().__init__(ctx)
        self._cap = int(ctx.options.get("memory_store_mb", 1024)) << 20
        self._evicted = 0
        self._kept: _Frames = ctx.shared.setdefault("memory store", _Frames())

    @property
    def counters(self) -> dict[str, int]:
        return {"evicted": self._evicted}

    def exists(self, namespace: KVNamespace, keys: Sequence[bytes], timeout_s: float) -> list[bool]:  # noqa: ARG002
        with self._kept.lock:
            return [(namespace.id, key) in self._kept.frames for key in keys]

    def get_into(
        self,
        namespace: KVNamespace,
        keys: Sequence[bytes],
        frames: Sequence[Frame],
        timeout_s: float,  # noqa: ARG002
    ) -> list[bool]:
        return [self._get(namespace, key, frame) for key, frame in zip(keys, frames, strict=True)]

    def put(
        self,
        namespace: KVNamespace,
        keys: Sequence[bytes],
        frames: Sequence[Frame],
        timeout_s: float,  # noqa: ARG002
    ) -> list[bool]:
        return [self._put((namespace.id, key), frame.tobytes()) for key, frame in zip(keys, frames, strict=True)]

    def delete(self, namespace: KVNamespace, timeout_s: float) -> int:  # noqa: ARG002
        kept = self._kept
        with kept.lock:
            gone = [place for place in kept.frames if place[0] == namespace.id]
            for place in gone:
                kept.bytes -= len(kept.frames.pop(place))
        return len(gone)

    def _get(self, namespace: KVNamespace, key: bytes, frame: Frame) -> bool:
        kept, place = self._kept, (namespace.id, key)
        with kept.lock:
            data = kept.frames.get(place)
            if data is None or len(data) != len(frame):
                return False
            kept.frames.move_to_end(place)
        frame.data[:] = data
        return True

    def _put(self, place: tuple[str, bytes], data: bytes) -> bool:
        kept = self._kept
        if len(data) > self._cap:
            return False
        with kept.lock:
            kept.bytes += len(data) - len(kept.frames.pop(place, b""))
            kept.frames[place] = data
            while kept.bytes > self._cap:
                kept.bytes -= len(kept.frames.popitem(last=False)[1])
                self._evicted += 1
        return True

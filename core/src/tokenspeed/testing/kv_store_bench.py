"""What the suites of KV stores work with: hosts and servers that tests meddle with, and a bench that makes stores and guards."""

from __future__ import annotations

import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenspeed.interfaces.kvstore import Frame, KVNamespace, KVStore, KVStoreContext
from tokenspeed.plugins.selection import load_target
from tokenspeed.plugins.specs import KVStoreSpec
from tokenspeed.runtime.kv_frames import frame_bytes
from tokenspeed.runtime.store_guard import StoreGuard
from tokenspeed.runtime.store_lane import aligned_memory

__all__ = [
    "LONG_S",
    "Pages",
    "StoreBench",
    "StoreHost",
    "StoreServer",
    "count",
    "eventually",
    "load",
    "random_keys",
    "random_pages",
    "save",
]

Pages = list[npt.NDArray[np.uint8]]

_FRAMES = 16
#: For operations of which the time does not matter.
LONG_S = 30.0
#: For opening and for probes, on a machine that has other things to do.
_PATIENCE_S = 15.0


class StoreHost(ABC):
    """Where a store keeps its frames, as a test meddles with it.

    Attributes:
        options: the plugin's options for this place.
    """

    options: Mapping[str, Any]

    @abstractmethod
    def read(self, namespace: KVNamespace, key: bytes) -> bytes:
        """What lies under ``key``."""

    @abstractmethod
    def write(self, namespace: KVNamespace, key: bytes, data: bytes) -> None:
        """Let ``data`` lie under ``key``, whatever its length."""


class StoreServer(StoreHost):
    """A host that is a process (or several) of its own."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, as a crash would."""

    @abstractmethod
    def start(self) -> None:
        """Run it again, at the same place; returns when it answers."""

    @abstractmethod
    def suspend(self) -> None:
        """It goes on holding its connections and answers nothing (SIGSTOP)."""

    @abstractmethod
    def resume(self) -> None:
        """It goes on (SIGCONT)."""


def random_pages(count: int, size: int, seed: int = 0) -> Pages:
    """``count`` pages of ``size`` random bytes."""
    return list(np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8))


def random_keys(count: int) -> list[bytes]:
    """Page hashes that nothing else uses."""
    return [os.urandom(16) for _ in range(count)]


class StoreBench:
    """Makes stores and guards of one kind, and closes them."""

    def __init__(self, spec: KVStoreSpec, options: Mapping[str, Any], page_bytes: int, timeout_s: float) -> None:
        self.page_bytes = page_bytes
        self._spec, self._options, self._timeout_s = spec, options, timeout_s
        self._shared: dict[str, Any] = {}
        self._open: list[KVStore | StoreGuard] = []
        self._staging: dict[int, npt.NDArray[np.uint8]] = {}

    def namespace(self, **fields: Any) -> KVNamespace:
        """One that no other test uses, but for the ``fields`` that are given."""
        common: dict[str, Any] = {"model": uuid.uuid4().hex, "dtype": "float32", "layout": "NHD", "page_size": 16}
        return KVNamespace(**{**common, "page_bytes": self.page_bytes, **fields})

    def make(self, staging: npt.NDArray[np.uint8]) -> KVStore:
        """A store over ``staging``; the caller closes it."""
        context = KVStoreContext(staging=staging, timeout_s=self._timeout_s, options=self._options, shared=self._shared)
        store: KVStore = load_target(self._spec.target)(context)
        return store

    def store(self) -> KVStore:
        """A store with staging for ``_FRAMES`` frames."""
        staging = aligned_memory(_FRAMES * frame_bytes(self.page_bytes))
        store = self.make(staging)
        self._open.append(store)
        self._staging[id(store)] = staging
        return store

    def frames(self, store: KVStore, count: int, size: int | None = None) -> list[Frame]:
        """Frames in a store's staging, full of zeros, each of ``size`` bytes."""
        stride = frame_bytes(self.page_bytes)
        staging = self._staging[id(store)]
        staging[:] = 0
        return [staging[i * stride : i * stride + (stride if size is None else size)] for i in range(count)]

    def put(
        self, store: KVStore, namespace: KVNamespace, keys: Sequence[bytes], contents: Sequence[bytes]
    ) -> list[bool]:
        """Put bytes as they are."""
        frames = self.frames(store, len(keys))
        for i, data in enumerate(contents):
            frames[i] = frames[i][: len(data)]
            frames[i].data[:] = data
        return store.put(namespace, keys, frames, LONG_S)

    def get(
        self, store: KVStore, namespace: KVNamespace, keys: Sequence[bytes], size: int | None = None
    ) -> list[bytes | None]:
        """What lies under each key."""
        frames = self.frames(store, len(keys), size)
        answer = store.get_into(namespace, keys, frames, LONG_S)
        return [frame.tobytes() if ok else None for frame, ok in zip(frames, answer, strict=True)]

    def guard(self, *namespaces: KVNamespace, timeout_s: float | None = None) -> StoreGuard:
        """The guard that an engine puts around the store."""
        guard = StoreGuard(self.make, namespaces, timeout_s=timeout_s or self._timeout_s, patience_s=_PATIENCE_S)
        self._open.append(guard)
        guard.open()
        return guard

    def close(self) -> None:
        """Close everything that was made."""
        for each in self._open:
            each.close()


def load(guard: StoreGuard, keys: Sequence[bytes], size: int) -> tuple[int, Pages]:
    """Load into fresh pages."""
    pages = [np.zeros(size, dtype=np.uint8) for _ in keys]
    return guard.load(0, keys, pages, time.monotonic() + LONG_S), pages


def save(guard: StoreGuard, keys: Sequence[bytes], pages: Pages) -> int:
    """Save all pages."""
    return guard.save(0, keys, pages, time.monotonic() + LONG_S)


def count(guard: StoreGuard, keys: Sequence[bytes]) -> int:
    """Leading keys that are there."""
    return guard.count(0, keys, time.monotonic() + LONG_S)


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Whether ``condition`` comes true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True

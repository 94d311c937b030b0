"""Contract of an L3 store of KV pages (``KVStoreSpec``, API 1).

A store keeps *frames*, opaque runs of bytes, under a namespace and a 16-byte page hash. A frame carries its own checksum, length and key, which core writes
before ``put`` and checks after ``get_into``: a store need not, but it must give back what it was given or say that it has not.

Core calls one object from one thread at a time, makes an object for each thread that it uses, and never waits for a call longer than the call's deadline: one
that hangs is left to its thread, and a new object is made when the store is tried again. A store that raises, hangs or answers wrong costs recomputation,
nothing else: an answer of another type or length than a method says is taken for a failure of the call. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Frame", "KVNamespace", "KVStore", "KVStoreContext"]

#: One-dimensional, contiguous uint8; inside ``KVStoreContext.staging`` when core calls.
Frame = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class KVNamespace:
    """What makes pages of equal hash interchangeable. Two engines share pages exactly where all of this is equal.

    Attributes:
        model: what the weights are (a digest of the checkpoint's files rather than its path).
        revision: version of the weights, and of anything else that changes what is written.
        dtype: element type of the KV cache.
        layout: order of a page's axes, and which layers stand in it.
        page_size: tokens of a page; page_bytes: its bytes on this rank.
        group: index of the cache group.
        rank, world_size: which part of every layer the rank holds.
        adapter, salt: set where an adapter's or a tenant's pages are to be deleted by themselves. The page hashes cover both already.
    """

    model: str
    revision: str = ""
    dtype: str
    layout: str
    page_size: int
    page_bytes: int
    group: int = 0
    rank: int = 0
    world_size: int = 1
    adapter: str = ""
    salt: str = ""

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ where any field differs, the same in every process."""
        return hashlib.blake2b(self.describe().encode(), digest_size=16).digest()

    @cached_property
    def id(self) -> str:
        """``digest`` as 32 hexadecimal digits: part of file names and keys."""
        return self.digest.hex()

    def describe(self) -> str:
        """All fields as JSON, in a fixed order."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class KVStoreContext:
    """What a store is built from.

    Attributes:
        staging: all frames of all calls lie in this memory (uint8, page aligned), which lives as long as the store does: register it once where that pays.
        timeout_s: the longest deadline that a call will be given.
        options: the plugin's options.
        shared: a dictionary that all objects of this engine process share, for connections or threads that they need only once.
    """

    staging: npt.NDArray[np.uint8]
    timeout_s: float
    options: Mapping[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


class KVStore(ABC):
    """Keeps frames by namespace and page hash.

    The constructor raises ``ConfigError`` for what a user must change (an option, a library that is missing), which ends the start; everything else that
    goes wrong, such as a server that does not answer, may wait for the first call.

    ``keys`` are 16-byte page hashes. Each call should end by ``timeout_s`` seconds and may raise anything; it must not touch ``frames`` after it has ended.
    """

    def __init__(self, ctx: KVStoreContext) -> None:
        self.ctx = ctx

    @property
    def counters(self) -> dict[str, int]:
        """What only the store knows, by name (``evicted``, ``reconnects``, ...); cumulative. Core counts hits, bytes, failures and time.

        Counts are of this object alone: core adds up those of all objects. Read after each call, on its thread.
        """
        return {}

    @abstractmethod
    def exists(self, namespace: KVNamespace, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """For each key, whether ``get_into`` would probably find it."""

    @abstractmethod
    def get_into(
        self, namespace: KVNamespace, keys: Sequence[bytes], frames: Sequence[Frame], timeout_s: float
    ) -> list[bool]:
        """Fill each frame with what was put under its key. False, with the frame in any state, where there is nothing or its length differs."""

    @abstractmethod
    def put(
        self, namespace: KVNamespace, keys: Sequence[bytes], frames: Sequence[Frame], timeout_s: float
    ) -> list[bool]:
        """Keep the frames; one that is there already is replaced. True where it can be found from now on by every process that shares the store.

        Another reader sees the old frame, the new one or none, never part of one that passes for the whole.
        """

    @abstractmethod
    def delete(self, namespace: KVNamespace, timeout_s: float) -> int:
        """Remove everything in ``namespace`` and nothing else; the number of frames removed where the store knows it, else 0."""

    def close(self) -> None:
        """Give back what the store holds; the object is not used again, but this may be called twice."""

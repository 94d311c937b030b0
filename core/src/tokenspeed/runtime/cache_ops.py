"""Cache operations of a plan: flat arrays of pages, cut into operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CacheOps", "Operation", "runs"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class CacheOps:
    """One entry a page; consecutive entries of one number are one operation. Copies: they live longer than the plan's own arrays.

    Attributes:
        write_back_*: device page to host page. load_back_*: host page to device page, for a row of the plan or -1.
        lookup_*: how many leading pages the store has, by hash (n, 16). prefetch_*: store to host page. store_*: host page to store.
    """

    write_back_op: Int64
    write_back_group: Int32
    write_back_device: Int32
    write_back_host: Int32
    load_back_op: Int64
    load_back_group: Int32
    load_back_host: Int32
    load_back_device: Int32
    load_back_row: Int32
    lookup_op: Int64
    lookup_group: Int32
    lookup_hash: Hashes
    prefetch_op: Int64
    prefetch_group: Int32
    prefetch_host: Int32
    prefetch_hash: Hashes
    store_op: Int64
    store_group: Int32
    store_host: Int32
    store_hash: Hashes

    @classmethod
    def of(cls, plan: Any) -> CacheOps | None:
        """The operations of ``plan``, whose arrays have the same names or which carries them whole; ``None`` where it has none."""
        if hasattr(plan, "cache_ops"):
            carried: CacheOps | None = plan.cache_ops
            return carried
        if not any(len(getattr(plan, name)) for name in _NUMBERS):
            return None
        return cls(**{name: np.array(getattr(plan, name)) for name in FIELDS})

    def pack(self) -> list[bytes]:
        """The arrays' bytes, field by field."""
        return [getattr(self, name).tobytes() for name in FIELDS]

    @classmethod
    def unpack(cls, packed: list[bytes]) -> CacheOps:
        """What ``pack`` packed."""
        return cls(**{name: _array(name, data) for name, data in zip(FIELDS, packed, strict=True)})


FIELDS = tuple(field.name for field in fields(CacheOps))
_NUMBERS = tuple(name for name in FIELDS if name.endswith("_op"))


def _array(name: str, data: bytes) -> npt.NDArray[Any]:
    if name.endswith("_hash"):
        return np.frombuffer(data, dtype=np.uint8).reshape(-1, 16)
    return np.frombuffer(data, dtype=np.int64 if name.endswith("_op") else np.int32)


@dataclass(frozen=True)
class Operation:
    """Entries ``begin`` to ``end`` of their arrays are operation ``number``, on cache group ``group``."""

    number: int
    group: int
    begin: int
    end: int

    @property
    def pages(self) -> int:
        """How many pages it moves."""
        return self.end - self.begin


def runs(numbers: Int64, groups: Int32) -> Iterator[Operation]:
    """The operations that stand in ``numbers``, one entry a page."""
    if not len(numbers):
        return
    cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    for begin, end in pairwise(cuts):
        yield Operation(int(numbers[begin]), int(groups[begin]), begin, end)

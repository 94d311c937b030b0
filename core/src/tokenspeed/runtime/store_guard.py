"""What the engine sees of an L3 store: pages in, pages out, and nothing that a store does can hurt more than a deadline.

Every page travels as a sealed frame, and is taken only if it is whole and the one that was asked for. Frames lie in staging memory: a call that hangs
may write there for as long as it likes, the host pages are never in a store's hands. Loads and saves have a lane each, so that a store that takes no
more writes still gives what it has.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenspeed.interfaces.kvstore import Frame, KVNamespace, KVStore
from tokenspeed.runtime.kv_frames import frame_bytes, seal, unseal
from tokenspeed.runtime.store_lane import MakeStore, StoreLane, Turn

__all__ = ["StoreCounters", "StoreGuard"]

Pages = Sequence[npt.NDArray[np.uint8]]

_STAGING_BYTES = 16 << 20
_MOST_FRAMES = 128
_KEYS = 1024
#: Pages remembered as bad, so that the next request computes them instead of loading them in vain.
_BAD_PAGES = 65_536


@dataclass
class StoreCounters:
    """Pages and bytes; cumulative. ``bad`` frames were torn, changed, or someone else's; ``lost`` ones were said to be there and were not."""

    looked_up: int = 0
    hits: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    saved: int = 0
    saved_bytes: int = 0
    bad: int = 0
    lost: int = 0


class StoreGuard:
    """Pages by namespace and hash, within deadlines; no method raises for what a store does, but ``open``.

    ``load`` and ``count`` come from one thread, ``save`` and ``delete`` from one other; ``page_bytes`` is the largest page that will be asked for.

    Args:
        patience_s: deadline of opening and of probes.
        timeout_s: deadline of each call of the store. An operation of many pages takes several, and begins none after its own deadline.
    """

    def __init__(
        self, make: MakeStore, namespaces: Sequence[KVNamespace], *, timeout_s: float, patience_s: float = 5.0
    ) -> None:
        self.namespaces = tuple(namespaces)
        self.counters = StoreCounters()
        self._timeout_s = timeout_s
        sizes = [frame_bytes(space.page_bytes) for space in namespaces]
        #: frames of one call, by group: few where they are large, such as states
        self._frames = [max(1, min(_MOST_FRAMES, _STAGING_BYTES // size)) for size in sizes]
        # Used by both threads, one operation of the dictionary at a time.
        self._bad: OrderedDict[tuple[int, bytes], None] = OrderedDict()

        def probe(store: KVStore) -> None:
            _flags("exists", store.exists(self.namespaces[0], [bytes(16)], timeout_s), 1)

        size = max(map(int.__mul__, self._frames, sizes))
        self._loads, self._saves = (
            StoreLane(make, name=name, staging_bytes=size, probe=probe, patience_s=max(patience_s, timeout_s))
            for name in ("loads", "saves")
        )

    @property
    def lanes(self) -> tuple[StoreLane, StoreLane]:
        """Of loads and of saves, for their figures."""
        return self._loads, self._saves

    def open(self) -> None:
        """Connect. Raises ``ConfigError`` where the store says that a user must change something; one that does not answer is tried again later."""
        for lane in self.lanes:
            lane.open()

    def close(self) -> None:
        """End the threads; a store that hangs is left behind."""
        for lane in self.lanes:
            lane.close(self._timeout_s)

    def count(self, group: int, keys: Sequence[bytes], deadline_s: float) -> int:
        """How many of the leading ``keys`` are there. ``deadline_s`` is of ``time.monotonic``."""
        space, found = self.namespaces[group], 0
        for begin in range(0, len(keys), _KEYS):
            part = self._until_bad(group, keys[begin : begin + _KEYS])
            answer = self._exists(self._loads, space, part, deadline_s) if part else None
            if answer is None:
                break
            here = _leading(answer)
            found += here
            if here < _KEYS:
                break
        self.counters.looked_up += len(keys)
        self.counters.hits += found
        return found

    def load(self, group: int, keys: Sequence[bytes], pages: Pages, deadline_s: float) -> int:
        """Fill ``pages`` from the front; how many of them are whole."""
        loaded = 0
        while loaded < len(keys):
            end = min(loaded + self._frames[group], len(keys))
            here = self._load(group, keys[loaded:end], pages[loaded:end], deadline_s)
            loaded += here
            if loaded < end:
                break
        self.counters.loaded += loaded
        self.counters.loaded_bytes += loaded * self.namespaces[group].page_bytes
        return loaded

    def save(self, group: int, keys: Sequence[bytes], pages: Pages, deadline_s: float) -> int:
        """Keep ``pages``; how many of the leading ones are there now, those included that were there already."""
        saved = 0
        while saved < len(keys):
            end = min(saved + self._frames[group], len(keys))
            here = self._save(group, keys[saved:end], pages[saved:end], deadline_s)
            saved += here
            if saved < end:
                break
        return saved

    def delete(self, group: int, deadline_s: float) -> bool:
        """Remove everything of a group's namespace; whether the store answered."""
        timeout_s = self._left(deadline_s)
        space = self.namespaces[group]
        return self._saves.call(lambda turn: _number(turn.store.delete(space, timeout_s)), timeout_s) is not None

    def _load(self, group: int, keys: Sequence[bytes], pages: Pages, deadline_s: float) -> int:
        space, timeout_s = self.namespaces[group], self._left(deadline_s)
        lent: list[Frame] = []

        def get(turn: Turn) -> list[bool]:
            lent.extend(self._slices(turn.staging, space, len(keys)))
            return _flags("get_into", turn.store.get_into(space, keys, lent, timeout_s), len(keys))

        answer = self._loads.call(get, timeout_s)
        if answer is None:
            return 0
        for index, key in enumerate(keys):
            page = unseal(lent[index], space, key) if answer[index] else None
            if page is None:
                if answer[index]:
                    self.counters.bad += 1
                else:
                    self.counters.lost += 1
                self._remember_bad(group, key)
                return index
            pages[index][:] = page
        return len(keys)

    def _save(self, group: int, keys: Sequence[bytes], pages: Pages, deadline_s: float) -> int:
        space = self.namespaces[group]
        answer = self._exists(self._saves, space, keys, deadline_s)
        if answer is None:
            return 0
        there = [ok and (group, key) not in self._bad for ok, key in zip(answer, keys, strict=True)]
        new = [index for index, ok in enumerate(there) if not ok]
        if not new:
            return len(keys)
        timeout_s = self._left(deadline_s)

        def put(turn: Turn) -> list[bool]:
            frames = self._slices(turn.staging, space, len(new))
            for frame, index in zip(frames, new, strict=True):
                seal(frame, space, keys[index], pages[index])
            # The pages may have been given to others while they were read, and the seal would vouch for them.
            if not turn.wanted:
                return []
            return _flags("put", turn.store.put(space, [keys[index] for index in new], frames, timeout_s), len(new))

        kept = self._saves.call(put, timeout_s) or []
        for index, ok in zip(new, kept, strict=False):
            if ok:
                there[index] = True
                self._bad.pop((group, keys[index]), None)
                self.counters.saved += 1
                self.counters.saved_bytes += space.page_bytes
        return _leading(there)

    def _exists(
        self, lane: StoreLane, space: KVNamespace, keys: Sequence[bytes], deadline_s: float
    ) -> list[bool] | None:
        timeout_s = self._left(deadline_s)
        return lane.call(lambda turn: _flags("exists", turn.store.exists(space, keys, timeout_s), len(keys)), timeout_s)

    def _left(self, deadline_s: float) -> float:
        """A call's deadline: its own, or none where the operation's has passed. A call that is cut short would look like a store that hangs."""
        return self._timeout_s if time.monotonic() < deadline_s else 0.0

    def _slices(self, staging: npt.NDArray[np.uint8], space: KVNamespace, count: int) -> list[Frame]:
        size = frame_bytes(space.page_bytes)
        return [staging[i * size : (i + 1) * size] for i in range(count)]

    def _until_bad(self, group: int, keys: Sequence[bytes]) -> Sequence[bytes]:
        for index, key in enumerate(keys):
            if (group, key) in self._bad:
                return keys[:index]
        return keys

    def _remember_bad(self, group: int, key: bytes) -> None:
        self._bad[(group, key)] = None
        while len(self._bad) > _BAD_PAGES:
            self._bad.popitem(last=False)


def _flags(call: str, answer: object, count: int) -> list[bool]:
    """A store's answer as a list of its own; asked on the lane's thread, so that a wrong one is a failure of the call. Raises ``TypeError``, ``ValueError``.

    Numbers are refused too: a status of 0 that means success, or one below 0 that means failure, would be taken for its opposite.
    """
    if not isinstance(answer, list | tuple):
        raise TypeError(f"{call} answered {type(answer).__name__}, not a list of {count} bool")
    wrong = next((type(one).__name__ for one in answer if not isinstance(one, bool | np.bool_)), None)
    if wrong is not None:
        raise TypeError(f"{call} answered a list with {wrong}, not of bool alone")
    if len(answer) != count:
        raise ValueError(f"{call} answered for {len(answer)} keys of {count}")
    return list(map(bool, answer))


def _number(removed: object) -> int:
    if not isinstance(removed, int | np.integer) or isinstance(removed, bool) or removed < 0:
        raise TypeError(f"delete answered {type(removed).__name__}, not how many frames it removed (0 where unknown)")
    return int(removed)


def _leading(answer: Sequence[bool]) -> int:
    return next((index for index, ok in enumerate(answer) if not ok), len(answer))

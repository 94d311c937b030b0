"""The engine's face of the tiers: what the scheduler is told of cache operations, and what the tiers of one rank are made of."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenspeed._scheduler import ExecutionPlan, Scheduler
from tokenspeed.builtin.host import available_memory
from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import Assembly
from tokenspeed.engine.settings import tier_size
from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kvstore import KVNamespace, KVStore, KVStoreContext
from tokenspeed.interfaces.platform import Platform
from tokenspeed.messages import TierStats
from tokenspeed.plugins.selection import load_target
from tokenspeed.runtime.cache_executor import CacheExecutor, CacheStats
from tokenspeed.runtime.cache_ops import runs
from tokenspeed.runtime.host_pool import HostPool, host_pages, part_bytes
from tokenspeed.runtime.kv_pool import KVPool, named_groups
from tokenspeed.runtime.store_guard import StoreGuard
from tokenspeed.runtime.stream_copies import staging_bytes
from tokenspeed.types import CacheGroup
from tokenspeed.weights.fingerprint import fingerprint

__all__ = ["CacheSource", "Load", "Tiers", "copy_bytes", "host_pages_of", "make_cache"]

#: What the end of an engine waits for pages on their way to the host and the store.
_FAREWELL_S = 5.0


class CacheSource(Protocol):
    """What tells how operations ended: the one rank's ``CacheExecutor``, or what combines those of several ranks."""

    @property
    def in_flight(self) -> int:
        """Operations not told of yet."""

    def finished(self) -> list[tuple[int, int]]:
        """(number, leading pages that are good), each operation once."""

    def wait(self, numbers: Collection[int]) -> dict[int, int]:
        """Good pages of load-backs, which ``finished`` tells of all the same."""

    def close(self) -> None:
        """End threads and connections."""


@dataclass(frozen=True)
class Load:
    """A load-back of ``pages`` pages that ``row`` of its plan needs."""

    number: int
    row: int
    pages: int


class Tiers:
    """Tells one scheduler how the operations of its plans ended.

    Args:
        cache: answers of all ranks; ``own`` is rank 0's executor, for its figures.
    """

    def __init__(self, scheduler: Scheduler, cache: CacheSource, own: CacheExecutor) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._own = own
        #: good pages of load-backs of plans in flight; ``None`` where that is not known yet
        self._loading: dict[int, int | None] = {}

    def figures(self) -> TierStats:
        """What moved so far."""
        stats, moved, store = self._scheduler.stats(), self._own.stats, self._own.store
        figures: dict[str, Any] = {}
        if store is not None:
            counters, lanes = store.counters, store.lanes
            figures = {
                "prefetched_bytes": counters.loaded_bytes,
                "stored_bytes": counters.saved_bytes,
                "bad_pages": counters.bad,
                "lost_pages": counters.lost,
                "store_errors": sum(lane.stats.failures for lane in lanes),
                "store_timeouts": sum(lane.stats.timeouts for lane in lanes),
                "bypassed": sum(lane.stats.bypassed for lane in lanes),
                "store_seconds": sum(lane.stats.seconds for lane in lanes),
                "store_evicted": sum(lane.counters.get("evicted", 0) for lane in lanes),
            }
        return TierStats(
            host_pages=stats.host_pages_total[0],
            host_free=stats.host_pages_free[0],
            host_cached=stats.host_pages_cached[0],
            host_moving=stats.host_pages_moving[0],
            store_up=(True, True) if store is None else (store.lanes[0].up, store.lanes[1].up),
            host_hit_tokens=stats.host_hit_tokens,
            storage_hit_tokens=stats.storage_hit_tokens,
            written_back=stats.pages_written_back,
            loaded_back=stats.pages_loaded_back,
            prefetched=stats.pages_prefetched,
            stored=stats.pages_stored,
            written_back_bytes=moved.written_back_bytes,
            loaded_back_bytes=moved.loaded_back_bytes,
            write_backs_failed=stats.write_backs_failed,
            load_backs_failed=stats.load_backs_failed,
            prefetches_failed=stats.prefetches_failed,
            stores_failed=stats.stores_failed,
            host_evicted=stats.host_evicted_pages,
            host_full=stats.host_full,
            lookups=stats.lookups,
            lookup_hits=stats.lookup_hits,
            prefetch_timeouts=stats.prefetch_timeouts,
            reloads=stats.reloads,
            **{"prefetched_bytes": 0, "stored_bytes": 0, **figures},
        )

    @property
    def moved(self) -> CacheStats:
        """What rank 0 has copied."""
        return self._own.stats

    @property
    def busy(self) -> bool:
        """Operations are under way, or decided and not in a plan yet."""
        return bool(self._cache.in_flight or self._scheduler.cache_ops_pending)

    def tell(self) -> bool:
        """Pass on what has ended; whether there was anything."""
        ended = self._cache.finished()
        if ended:
            self._loading.update((number, good) for number, good in ended if number in self._loading)
            numbers, pages = zip(*ended, strict=True)
            self._scheduler.cache_done(np.array(numbers, dtype=np.int64), np.array(pages, dtype=np.int32))
        return bool(ended)

    def loads(self, plan: ExecutionPlan) -> tuple[Load, ...]:
        """Load-backs that rows of ``plan`` need."""
        rows = plan.load_back_row
        loads = tuple(
            Load(run.number, int(rows[run.begin]), run.pages)
            for run in runs(plan.load_back_op, plan.load_back_group)
            if rows[run.begin] >= 0
        )
        self._loading.update(dict.fromkeys(load.number for load in loads))
        return loads

    def failed_rows(self, loads: Sequence[Load]) -> list[int]:
        """Rows whose pages did not all come; waits for the copies."""
        if not loads:
            return []
        good = {load.number: self._loading.pop(load.number) for load in loads}
        if unknown := [number for number, pages in good.items() if pages is None]:
            good.update(self._cache.wait(unknown))
        return sorted({load.row for load in loads if (good[load.number] or 0) < load.pages})

    def close(self, next_plan: Callable[[], object]) -> None:
        """Let what is under way reach host and store, within reason, and end.

        Args:
            next_plan: takes and executes the next plan, which has no rows; new operations stand in it.
        """
        end = time.monotonic() + _FAREWELL_S
        try:
            while self.busy and time.monotonic() < end:
                if self.tell() or self._scheduler.cache_ops_pending:
                    next_plan()
                else:
                    time.sleep(0.001)
        finally:
            self._cache.close()


def copy_bytes(config: EngineConfig, groups: Sequence[CacheGroup], page_size: int, element_bytes: int) -> int:
    """Memory of an accelerator that copies to and from the host tier take beside the KV pool; 0 without a host tier."""
    return staging_bytes(groups, page_size, element_bytes) if any(tier_size(config)) else 0


def host_pages_of(assembly: Assembly, pool: KVPool, *, ranks: int, pinned: bool) -> list[int]:
    """Host pages of each cache group; empty where there is no host tier.

    Args:
        ranks: of this machine; each one takes as much.
        pinned: the memory is taken at once. Otherwise it is as pages are first written, and what other ranks asked for does not show yet.

    Raises:
        ConfigError: no host page can be had where one is asked for, or more than the machine has or can give.
    """
    config = assembly.config
    ratio, size = tier_size(config)
    page_bytes = [
        sum(part_bytes(tensor) for _, tensors in pool.page_tensors(group) for tensor in tensors)
        for group in range(len(pool.groups))
    ]
    pages = host_pages(page_bytes, pool.num_pages, ratio=ratio, size=size)
    flag = "--kvstore-ratio" if size is None else "--kvstore-size"
    if not any(pages):
        if size is None and config.kvstore is None:
            return []
        raise ConfigError(
            f"{flag}: the host tier holds no page of {max(page_bytes)} bytes, and a KV store needs one; raise it"
        )
    for group, count, each in zip(pool.groups, pages, page_bytes, strict=True):
        # A prefix is of use only where all that a window reads is there.
        least = max(1, -(-(group.window - 1) // assembly.page_size))
        if count < least:
            what = {"recurrent": "state", "window": f"page of a window of {group.window} tokens"}.get(
                group.kind, "page"
            )
            raise ConfigError(
                f"{flag}: the host tier holds {count} of {least} times {each} bytes, the least that makes a {what} of use; raise it"
            )
    _check_memory(sum(map(int.__mul__, page_bytes, pages)), ranks=ranks, pinned=pinned)
    return pages


def _check_memory(need: int, *, ranks: int, pinned: bool) -> None:
    """Raises ``ConfigError`` where a machine cannot give ``need`` bytes to each of ``ranks`` processes."""
    total, has = need * ranks, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free, now = available_memory(), need if pinned else total
    if total <= has and now <= free:
        return
    gives = f"has {has / 2**30:.1f} GiB" if total > has else f"can give {free / 2**30:.1f} GiB now"
    each = "" if ranks == 1 else f" in each of {ranks} ranks"
    raise ConfigError(
        f"a host tier of {need / 2**30:.1f} GiB{each} is asked for, and the machine {gives}; lower --kvstore-ratio or --kvstore-size"
    )


def make_cache(
    assembly: Assembly, platform: Platform, pool: KVPool, *, rank: int, world_size: int
) -> CacheExecutor | None:
    """The tiers of one rank; ``None`` without a host tier.

    Raises:
        ConfigError: sizes that do not work, or a store that says what a user must change.
    """
    config, device = assembly.config, platform.device
    pinned = device.type != "cpu"
    pages = host_pages_of(assembly, pool, ranks=world_size, pinned=pinned)
    if not pages:
        return None
    host = HostPool(pool, pages, pinned=pinned)
    store, timeout_s = None, config.kvstore_timeout_ms / 1000
    if (spec := assembly.kv_store) is not None:
        options, shared = assembly.options_of("kv_store"), dict[str, Any]()

        def make(staging: npt.NDArray[np.uint8]) -> KVStore:
            context = KVStoreContext(staging=staging, timeout_s=timeout_s, options=options, shared=shared)
            made: KVStore = load_target(spec.target)(context)
            return made

        spaces = _namespaces(assembly, pool, host, rank, world_size)
        store = StoreGuard(make, spaces, timeout_s=timeout_s)
        try:
            store.open()
        except BaseException:
            store.close()
            raise
    cache = CacheExecutor(host, device=device, store=store, timeout_s=timeout_s)
    pool.use_transfers(cache.wait_layer)
    return cache


def _namespaces(assembly: Assembly, pool: KVPool, host: HostPool, rank: int, world_size: int) -> list[KVNamespace]:
    config = assembly.config
    model = fingerprint(assembly.model)
    spaces = []
    for index, group in enumerate(pool.groups):
        layers = "; ".join(_describe(each) for each in named_groups(pool.groups, index))
        spaces.append(
            KVNamespace(
                model=model,
                # What a layer writes depends on what the layers below compute with.
                revision=f"1 {config.dtype}",
                dtype=config.kv_cache_dtype,
                layout=f"{pool.layout.value} {layers}",
                page_size=pool.page_sizes[index] or group.interval,
                page_bytes=host.page_bytes[index],
                group=index,
                rank=rank,
                world_size=world_size,
            )
        )
    return spaces


def _describe(group: CacheGroup) -> str:
    """What a page of ``group`` holds, for the name of its pages in a store."""
    layers = f"{group.kind} {','.join(map(str, group.layers))}"
    if group.kind == "recurrent":
        return f"{layers} states {group.states} {group.state_dtypes}"
    window = f" window {group.window}" if group.kind == "window" else ""
    return f"{layers} heads {group.kv_heads} of {group.head_dim}/{group.v_head_dim}{window}"

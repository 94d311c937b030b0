"""The KV pool of one rank: how many pages each cache group has, and the memory for them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tokenspeed.engine.assembly import Assembly
from tokenspeed.engine.memory import out_of_memory, pool_flag
from tokenspeed.engine.tiers import copy_bytes
from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.platform import Platform
from tokenspeed.layers.dtypes import dtype_from_name
from tokenspeed.runtime.kv_pool import KVPool, further_pages, pages_in_budget, pages_in_tokens
from tokenspeed.runtime.parallel import TalkingGroup
from tokenspeed.types import CacheGroup

__all__ = ["count_pages", "make_pool"]


def count_pages(
    assembly: Assembly,
    platform: Platform,
    groups: Sequence[CacheGroup],
    everyone: TalkingGroup | None,
    *,
    reserved_bytes: int = 0,
) -> list[int]:
    """Pages of each group, the same on all ranks: out of one budget, first those of which a request needs few, then the full groups'.
    ``reserved_bytes`` of what the platform gives are for others."""
    config = assembly.config
    element_bytes = dtype_from_name(config.kv_cache_dtype).itemsize
    sizes: dict[str, int] = {"rows": _set(config.max_num_seqs), "max_model_len": _set(config.max_model_len)}
    if config.max_total_tokens is not None:
        full = pages_in_tokens(config.max_total_tokens, assembly.page_size)
        further = further_pages(groups, assembly.page_size, element_bytes, **sizes)
        return [full if group.keeps_all else pages for group, pages in zip(groups, further, strict=True)]
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = max(0, platform.kv_memory_bytes(config.gpu_memory_utilization) - reserved_bytes)
        if platform.device.type != "cpu":
            budget = max(0, budget - copy_bytes(config, groups, assembly.page_size, element_bytes))
    further = further_pages(groups, assembly.page_size, element_bytes, **sizes, budget_bytes=budget)
    left = budget - sum(_group_bytes(assembly, group, pages) for group, pages in zip(groups, further, strict=True))
    full = pages_in_budget(
        [group for group in groups if group.keeps_all], assembly.page_size, element_bytes, max(left, 0)
    )
    counts = [full if group.keeps_all else pages for group, pages in zip(groups, further, strict=True)]
    return counts if everyone is None else [everyone.smallest(count) for count in counts]


def _group_bytes(assembly: Assembly, group: CacheGroup, pages: int) -> int:
    size = dtype_from_name(assembly.config.kv_cache_dtype).itemsize
    return pages * (assembly.page_size * group.bytes_per_token(size) + group.bytes_per_state(size))


def make_pool(
    assembly: Assembly, platform: Platform, groups: Sequence[CacheGroup], pages: Sequence[int] | None
) -> KVPool:
    """The KV pool; of a page or state for each group where its size is not known yet (``None``).

    Raises:
        ConfigError: the device has not the memory, which a host would else find out in the midst of requests.
    """
    dtype = dtype_from_name(assembly.config.kv_cache_dtype)
    lasting = pages is not None
    pages = [1] * len(groups) if pages is None else pages
    need = sum(_group_bytes(assembly, group, count) for group, count in zip(groups, pages, strict=True))
    flag = pool_flag(assembly.config)
    name = flag.partition(" ")[0]
    has = _memory_bytes(platform)
    text = f"{name}: a KV pool of {pages[0] * assembly.page_size} tokens needs {need / 2**30:.1f} GiB of memory"
    if need > has:
        raise ConfigError(f"{text}, and the machine has {has / 2**30:.1f} GiB; lower {flag}")
    try:
        with platform.allocate("kv"):
            pool = KVPool(
                groups,
                layout=assembly.kv_layout,
                page_sizes=[0 if group.kind == "recurrent" else assembly.page_size for group in groups],
                num_pages=pages,
                dtype=dtype,
                device=platform.device,
            )
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise ConfigError(f"{text}, which the machine cannot give; lower {flag}") from error
    if lasting:
        platform.settle("kv", pool.tensors)
    return pool


def _memory_bytes(platform: Platform) -> int:
    """All the memory of the device, in use or not."""
    if (use := platform.memory_use()) is not None:
        return use.total
    if platform.device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1 << 62  # unknown: the allocation tells


def _set(value: int | None) -> int:
    assert value is not None, "assembly resolves every limit"
    return value

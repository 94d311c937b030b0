"""The KV pool of one rank: how many pages each cache group has, and the memory for them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import Assembly
from tokenspeed.engine.memory import out_of_memory, pool_flag
from tokenspeed.engine.settings import resolved
from tokenspeed.engine.tiers import copy_bytes
from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.platform import Platform
from tokenspeed.layers.dtypes import dtype_from_name
from tokenspeed.messages import GroupInfo
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.runtime.host_pool import part_bytes
from tokenspeed.runtime.kv_pool import KVPool, further_pages, pages_in_budget, pages_in_tokens, unpaid_pages
from tokenspeed.runtime.parallel import TalkingGroup
from tokenspeed.types import CacheGroup

__all__ = ["count_pages", "group_infos", "make_pool"]


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
    _check_states(config, groups, assembly.page_size)
    element_bytes = dtype_from_name(config.kv_cache_dtype).itemsize
    sizes: dict[str, int] = {"rows": resolved(config.max_num_seqs), "max_model_len": resolved(config.max_model_len)}
    prompt_tokens = resolved(config.chunked_prefill_size) * (1 if config.disable_overlap_schedule else 2)
    if config.max_total_tokens is not None:
        full = pages_in_tokens(config.max_total_tokens, assembly.page_size)
        further = further_pages(groups, assembly.page_size, element_bytes, **sizes, prompt_tokens=prompt_tokens)
        return [full if group.keeps_all else pages for group, pages in zip(groups, further, strict=True)]
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = max(0, platform.kv_memory_bytes(config.gpu_memory_utilization) - reserved_bytes)
        if platform.device.type != "cpu":
            budget = max(0, budget - copy_bytes(config, groups, assembly.page_size, element_bytes))
    budget = max(0, budget - sum(group.bytes_per_state(element_bytes) for group in groups))  # the pool's spare states
    further = further_pages(
        groups, assembly.page_size, element_bytes, **sizes, prompt_tokens=prompt_tokens, budget_bytes=budget
    )
    left = budget - sum(_page_bytes(assembly, group) * pages for group, pages in zip(groups, further, strict=True))
    whole = [group for group in groups if group.keeps_all]
    if any(group.layers for group in whole):
        full = pages_in_budget(whole, assembly.page_size, element_bytes, max(left, 0))
    else:
        full = unpaid_pages(assembly.page_size, **sizes)
    counts = [full if group.keeps_all else pages for group, pages in zip(groups, further, strict=True)]
    return counts if everyone is None else [everyone.smallest(count) for count in counts]


def _check_states(config: EngineConfig, groups: Sequence[CacheGroup], page_size: int) -> None:
    """Raises ``ConfigError`` where states could not be kept at ends of pages, or would be of a type that nothing computes with."""
    for group in groups:
        if group.kind == "recurrent" and group.interval % page_size:
            raise ConfigError(
                f"--block-size {page_size}: the model's states can be kept every {group.interval} tokens, which must be the end of a page; choose a divisor"
            )
    if config.kv_cache_dtype == "fp8" and any(g.kind == "recurrent" and not g.state_dtypes for g in groups):
        raise ConfigError(
            "--kv-cache-dtype fp8: the model's recurrent states are of the cache's type, and fp8 has too few digits for them; choose another"
        )


def _page_bytes(assembly: Assembly, group: CacheGroup) -> int:
    size = dtype_from_name(assembly.config.kv_cache_dtype).itemsize
    return assembly.page_size * group.bytes_per_token(size) + group.bytes_per_state(size)


def _group_bytes(assembly: Assembly, group: CacheGroup, pages: int) -> int:
    """Of a pool: states are one more."""
    return (pages + (group.kind == "recurrent")) * _page_bytes(assembly, group)


def make_pool(
    assembly: Assembly,
    platform: Platform,
    groups: Sequence[CacheGroup],
    pages: Sequence[int] | None,
    kernels: KernelRegistry,
) -> KVPool:
    """The KV pool; of a page or state for each group where its size is not known yet (``None``).

    Raises:
        ConfigError: the device has not the memory, which a host would else find out in the midst of requests.
        PluginError: a kernel that copies or zeroes states was named and cannot be used.
    """
    dtype = dtype_from_name(assembly.config.kv_cache_dtype)
    lasting = pages is not None
    pages = [1] * len(groups) if pages is None else pages
    need = sum(_group_bytes(assembly, group, count) for group, count in zip(groups, pages, strict=True))
    apart = sum(_group_bytes(assembly, g, count) for g, count in zip(groups, pages, strict=True) if not g.keeps_all)
    flag = pool_flag(assembly.config)
    name = flag.partition(" ")[0]
    has = _memory_bytes(platform)
    # Where full groups cost nothing, windows and states take what the budget has, however few the requests.
    by_rows = assembly.config.max_total_tokens is not None or any(group.keeps_all and group.layers for group in groups)
    if apart > has and by_rows:
        rows = resolved(assembly.config.max_num_seqs)
        raise ConfigError(
            f"--max-num-seqs {rows}: windows and states for so many requests need {apart / 2**30:.1f} GiB of memory, and the machine has"
            f" {has / 2**30:.1f} GiB; lower --max-num-seqs"
        )
    text = f"{name}: a KV pool of {pages[0] * assembly.page_size} tokens needs {need / 2**30:.1f} GiB of memory"
    if need > has:
        raise ConfigError(f"{text}, and the machine has {has / 2**30:.1f} GiB; lower {flag}")
    try:
        with platform.allocate("kv"):
            pool = KVPool(
                groups,
                select_kernel=kernels.select,
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


def group_infos(pool: KVPool, host_pages: Sequence[int]) -> list[GroupInfo]:
    """What the engine says of its cache groups; nothing where all are full.

    Args:
        host_pages: of each group; empty without a host tier.
    """
    if all(group.keeps_all for group in pool.groups):
        return []
    hosts = host_pages or [0] * len(pool.groups)
    return [
        GroupInfo(
            kind="full" if group.keeps_all else group.kind,
            span=group.window or group.interval,
            pages=pool.num_pages[index],
            host_pages=hosts[index],
            page_bytes=sum(part_bytes(tensor) for _, tensors in pool.page_tensors(index) for tensor in tensors),
        )
        for index, group in enumerate(pool.groups)
        if index == 0 or not group.keeps_all
    ]


def _memory_bytes(platform: Platform) -> int:
    """All the memory of the device, in use or not."""
    if (use := platform.memory_use()) is not None:
        return use.total
    if platform.device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1 << 62  # unknown: the allocation tells

"""The KV pool of one rank: how many pages each cache group has, and the memory for them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import Assembly
from tokenspeed.engine.tiers import copy_bytes
from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.platform import Platform
from tokenspeed.layers.dtypes import dtype_from_name
from tokenspeed.messages import GroupInfo
from tokenspeed.runtime.host_pool import part_bytes
from tokenspeed.runtime.kv_pool import KVPool, further_pages, pages_in_budget, pages_in_tokens, unpaid_pages
from tokenspeed.runtime.parallel import TalkingGroup
from tokenspeed.types import CacheGroup

__all__ = ["count_pages", "group_infos", "make_pool"]


def count_pages(
    assembly: Assembly, platform: Platform, groups: Sequence[CacheGroup], everyone: TalkingGroup | None
) -> list[int]:
    """Pages of each group, the same on all ranks: out of one budget, first those of which a request needs few, then the full groups'."""
    config = assembly.config
    _check_states(config, groups, assembly.page_size)
    element_bytes = dtype_from_name(config.kv_cache_dtype).itemsize
    sizes: dict[str, int] = {"rows": _set(config.max_num_seqs), "max_model_len": _set(config.max_model_len)}
    if config.max_total_tokens is not None:
        full = pages_in_tokens(config.max_total_tokens, assembly.page_size)
        further = further_pages(groups, assembly.page_size, element_bytes, **sizes)
        return [full if group.keeps_all else pages for group, pages in zip(groups, further, strict=True)]
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = platform.kv_memory_bytes(config.gpu_memory_utilization)
        if platform.device.type != "cpu":
            budget = max(0, budget - copy_bytes(config, groups, assembly.page_size, element_bytes))
    budget = max(0, budget - sum(group.bytes_per_state(element_bytes) for group in groups))  # the pool's spare states
    further = further_pages(groups, assembly.page_size, element_bytes, **sizes, budget_bytes=budget)
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


def make_pool(assembly: Assembly, platform: Platform, groups: Sequence[CacheGroup], pages: Sequence[int]) -> KVPool:
    """The KV pool. Raises ``ConfigError`` where the device has not the memory, which a host would else find out in the midst of requests."""
    dtype = dtype_from_name(assembly.config.kv_cache_dtype)
    need = sum(_group_bytes(assembly, group, count) for group, count in zip(groups, pages, strict=True))
    flag = "--kv-cache-memory-bytes" if assembly.config.max_total_tokens is None else "--max-total-tokens"
    has = _memory_bytes(platform.device)
    text = f"{flag}: a KV pool of {pages[0] * assembly.page_size} tokens needs {need / 2**30:.1f} GiB of memory"
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
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ConfigError(f"{text}, which the machine cannot give; lower {flag}") from error
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


def _memory_bytes(device: torch.device) -> int:
    """All the memory of the device, in use or not."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return 1 << 62  # unknown: the allocation tells


def _set(value: int | None) -> int:
    assert value is not None, "assembly resolves every limit"
    return value

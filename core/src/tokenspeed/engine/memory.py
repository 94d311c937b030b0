"""What the device's memory went to, and what a user can lower when it runs out. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenspeed.config import EngineConfig
from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.platform import Platform

__all__ = ["memory_advice", "memory_by_use", "out_of_memory", "pool_flag", "size_text"]

#: How allocators, drivers and libraries say it: torch's and the driver's words, the host's allocator, cuBLAS and its kin.
_SAID = ("out of memory", "can't allocate memory", "_alloc_failed")


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that host or device memory ran out, whoever raised it."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in text for word in _SAID))


@contextmanager
def memory_advice(doing: str, advice: str) -> Iterator[None]:
    """Turn an error that says that memory ran out into one sentence: what was being done, and what to lower.

    Raises:
        ConfigError: memory ran out.
    """
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        cause = str(error).partition("\n")[0].partition(". ")[0].strip() or type(error).__name__
        raise ConfigError(f"memory ran out while {doing} ({cause}): {advice}") from error


def pool_flag(config: EngineConfig) -> str:
    """The flag that decided the size of the KV pool, with its value."""
    if config.max_total_tokens is not None:
        return f"--max-total-tokens (now {config.max_total_tokens})"
    if config.kv_cache_memory_bytes is not None:
        return f"--kv-cache-memory-bytes (now {size_text(config.kv_cache_memory_bytes)})"
    return f"--gpu-memory-utilization (now {config.gpu_memory_utilization:g})"


def memory_by_use(platform: Platform) -> dict[str, int]:
    """Bytes of the device by what they are for: the tags of ``Platform.allocate``, ``steps``, ``free`` and ``total``; empty where the platform cannot tell."""
    use = platform.memory_use()
    if use is None:
        return {}
    steps = max(0, use.scratch - use.tags.get("graphs", 0))  # what graphs compute in is kept by the allocator too
    return {**use.tags, "steps": steps, "free": use.free, "total": use.total}


def size_text(count: int) -> str:
    """Bytes in the largest unit of 1024 that leaves at least one."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"

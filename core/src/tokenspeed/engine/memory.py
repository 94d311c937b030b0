"""What the device's memory went to, and what a user can lower when it runs out. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenspeed.config import EngineConfig
from tokenspeed.errors import ConfigError, TokenSpeedError
from tokenspeed.interfaces.platform import Platform

__all__ = ["memory_advice", "memory_by_use", "out_of_memory", "pool_flag", "size_text"]

#: How allocators, drivers and libraries say it: torch's and the driver's words, the host's allocator, cuBLAS and its kin.
_SAID = ("out of memory", "can't allocate memory", "_alloc_failed")


def out_of_memory(error: BaseException) -> str:
    """The words in which ``error``, or one that it was raised from, says that host or device memory ran out; an empty string where none does.

    Leaving a capture that found no memory raises an error of its own, whose cause is what it was raised during. Any other error that is raised while one of
    memory is handled is a fault of its own.
    """
    if isinstance(error, TokenSpeedError):
        return ""
    at: BaseException | None = error
    while at is not None:
        text = str(at)
        if isinstance(at, MemoryError) or (
            isinstance(at, RuntimeError) and any(word in text.lower() for word in _SAID)
        ):
            return text.partition("\n")[0].partition(". ")[0].strip() or type(at).__name__
        ends_capture = isinstance(at, RuntimeError) and "capture" in text.lower()
        at = at.__cause__ or (at.__context__ if ends_capture else None)
    return ""


@contextmanager
def memory_advice(doing: str, advice: str) -> Iterator[None]:
    """Turn an error that says that memory ran out into one sentence: what was being done, and what to lower.

    Raises:
        ConfigError: memory ran out.
    """
    try:
        yield
    except Exception as error:
        if not (cause := out_of_memory(error)):
            raise
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

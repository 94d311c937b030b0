"""What the host offers this process: CPUs, memory, instruction sets. Standard library only; Linux (cgroups included) and macOS."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

__all__ = ["available_memory", "cpu_features", "usable_cpus"]

_GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")
# cgroup v1 writes "no limit" as a number near 2^63.
_UNLIMITED = 1 << 60


def usable_cpus() -> frozenset[int]:
    """CPUs that this process may run on, no more of them than the cgroup's quota pays for."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quota = _cpu_quota()
    return frozenset(cpus[: max(1, quota)] if quota else cpus)


def _cpu_quota() -> int:
    """Whole CPUs of the cgroup's bandwidth limit, 0 without one."""
    text = _read(_CGROUP / "cpu.max").split()
    if len(text) == 2 and text[0] != "max":
        return int(text[0]) // int(text[1]) or 1
    quota, period = _number(_CGROUP / "cpu/cpu.cfs_quota_us"), _number(_CGROUP / "cpu/cpu.cfs_period_us")
    return max(1, quota // period) if quota > 0 and period > 0 else 0


def available_memory() -> int:
    """Bytes that this process could still use without swapping: the system's estimate, or less where a cgroup limits it."""
    free = _system_memory()
    for limit, used, inactive in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        bound = _number(_CGROUP / limit)
        if 0 < bound < _UNLIMITED:
            free = min(free, bound - _number(_CGROUP / used) + _inactive_file(_CGROUP / inactive))
    return max(0, free)


def _system_memory() -> int:
    for line in _read(_MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if platform.system() == "Darwin":
        return _darwin_memory()
    return 4 * _GIB


def _darwin_memory() -> int:
    """Free, inactive and speculative pages of ``vm_stat``."""
    try:
        text = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 4 * _GIB
    pages, page_size = 0, 4096
    for line in text.splitlines():
        if "page size of" in line:
            page_size = int(line.split("page size of")[1].split()[0])
        name, _, count = line.partition(":")
        if name in ("Pages free", "Pages inactive", "Pages speculative"):
            pages += int(count.strip().rstrip("."))
    return pages * page_size


def _inactive_file(path: Path) -> int:
    """Page cache that the cgroup counts as used and gives back under pressure."""
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def cpu_features() -> frozenset[str]:
    """Instruction-set flags as the kernel names them; empty where it does not tell."""
    for line in _read(_CPUINFO).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return frozenset({"asimd"})
    return frozenset()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else 0

"""What the CPU platform makes of its host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenspeed.builtin import host
from tokenspeed.builtin.platform_cpu import CpuPlatform
from tokenspeed.interfaces.platform import PlatformContext

GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pretended /proc and /sys/fs/cgroup: 16 GiB available, no limits."""
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {16 * GIB // 1024} kB\n")
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu avx2 avx512f\n")
    return tmp_path


def test_memory_is_what_the_system_estimates(system: Path) -> None:
    assert host.available_memory() == 16 * GIB


def test_a_cgroup_limit_counts_less_what_is_used_and_not_its_page_cache(system: Path) -> None:
    (system / "memory.max").write_text(f"{4 * GIB}\n")
    (system / "memory.current").write_text(f"{3 * GIB}\n")
    (system / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    assert host.available_memory() == 2 * GIB
    (system / "memory.max").write_text("max\n")
    assert host.available_memory() == 16 * GIB


def test_threads_follow_affinity_and_the_quota(system: Path) -> None:
    assert CpuPlatform(PlatformContext()).threads == 8
    (system / "cpu.max").write_text("250000 100000\n")
    assert CpuPlatform(PlatformContext()).threads == 2
    assert CpuPlatform(PlatformContext(local_world_size=2)).threads == 1
    assert CpuPlatform(PlatformContext(threads=5)).threads == 5


def test_ranks_of_one_host_share_the_kv_budget(system: Path) -> None:
    alone = CpuPlatform(PlatformContext()).kv_memory_bytes(0.9)
    assert alone == 4 * GIB
    assert CpuPlatform(PlatformContext(local_world_size=2)).kv_memory_bytes(0.9) == 2 * GIB
    (system / "meminfo").write_text(f"MemAvailable: {8 * GIB // 1024} kB\n")
    assert CpuPlatform(PlatformContext()).kv_memory_bytes(0.9) == 2 * GIB


def test_bf16_stays_where_the_processor_multiplies_it(system: Path) -> None:
    platform = CpuPlatform(PlatformContext())
    assert [platform.default_dtype_name(name) for name in ("bfloat16", "float16", "float32")] == ["float32"] * 3
    (system / "cpuinfo").write_text("flags : avx512f avx512_bf16\n")
    assert platform.default_dtype_name("bfloat16") == "bfloat16"
    assert platform.default_dtype_name("float16") == "float32"


def test_the_start_up_line_names_the_best_instruction_set(system: Path) -> None:
    assert CpuPlatform(PlatformContext(threads=1)).describe() == "cpu (AVX-512, 1 thread)"
    (system / "cpuinfo").write_text("Features : fp asimd\n")
    assert CpuPlatform(PlatformContext(threads=2)).describe() == "cpu (NEON, 2 threads)"

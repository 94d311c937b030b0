"""Running out of memory ends in one sentence that says what to lower; other errors stay what they are."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.config import EngineConfig
from tokenspeed.engine.memory import memory_advice, out_of_memory, pool_flag, size_text
from tokenspeed.engine.process import failure_of
from tokenspeed.errors import ConfigError

OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (OUT, True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (ConfigError("the pool is out of memory"), False),
    ],
)
def test_errors_of_memory_are_told_from_others_whoever_raises_them(error: Exception, is_memory: bool) -> None:
    assert bool(out_of_memory(error)) is is_memory


def test_an_error_of_memory_is_found_behind_the_one_that_it_led_to() -> None:
    def capture() -> None:
        try:
            raise OUT
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    with pytest.raises(ConfigError, match=r"\(CUDA out of memory\)"), memory_advice("capturing graphs", "lower it"):
        capture()


def test_the_sentence_names_what_was_done_the_cause_and_what_to_lower() -> None:
    with (
        pytest.raises(
            ConfigError,
            match=r"^memory ran out while capturing graphs \(CUDA out of memory\): lower --x \(now 1\)$",
        ) as caught,
        memory_advice("capturing graphs", "lower --x (now 1)"),
    ):
        raise OUT
    assert failure_of(caught.value).kind == "config", "a setting: `serve` exits with 2 and prints no trace"
    with pytest.raises(RuntimeError, match="illegal"), memory_advice("capturing graphs", "lower --x"):
        raise RuntimeError("illegal access")


def test_an_error_raised_while_one_of_memory_is_handled_is_told_as_itself() -> None:
    """A cleanup that fails is a fault to mend, and no setting to lower."""
    try:
        try:
            raise OUT
        finally:
            {}["row"]
    except KeyError as error:
        caught = error
    assert out_of_memory(caught) == ""
    assert failure_of(caught).error == "KeyError: 'row'"


def test_an_engine_that_finds_no_memory_tells_what_to_lower_and_what_was_raised() -> None:
    failure = failure_of(OUT)
    assert failure.kind == "internal"
    assert failure.error.startswith("memory ran out (CUDA out of memory): ")
    assert "lower --gpu-memory-utilization, --max-num-seqs or --chunked-prefill-size" in failure.error
    assert failure.error.endswith(f"; OutOfMemoryError: {OUT}")


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"max_total_tokens": 5000}, "--max-total-tokens (now 5000)"),
        ({"kv_cache_memory_bytes": 3 << 30}, "--kv-cache-memory-bytes (now 3.0 GiB)"),
        ({"gpu_memory_utilization": 0.98}, "--gpu-memory-utilization (now 0.98)"),
        ({}, "--gpu-memory-utilization (now 0.9)"),
    ],
)
def test_the_flag_to_lower_is_the_one_that_sized_the_pool(settings: dict[str, int], flag: str) -> None:
    assert pool_flag(EngineConfig(model="m", **settings)) == flag  # type: ignore[arg-type]


def test_sizes_are_told_in_the_largest_unit() -> None:
    assert [size_text(n) for n in (1, 1023, 1024, 3 << 29, 1 << 50)] == [
        "1 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 GiB",
        "1024.0 TiB",
    ]

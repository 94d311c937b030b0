"""Times kernels of one operation beside each other, on the CPU or in captured graphs on a device."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tokenspeed.errors import ConfigError

__all__ = ["SIZES", "arguments_for", "time_calls"]

#: Sizes that a mode is timed with where ``--shape`` does not give them; ``m`` comes from ``--rows``.
SIZES: Mapping[str, Mapping[str, int]] = {
    "gemm.linear": {"n": 4096, "k": 4096},
    "gemm.linear_silu_mul": {"n": 8192, "k": 4096},
    "norm.rms_norm": {"hidden": 4096},
    "norm.add_rms_norm": {"hidden": 4096},
    "activation.silu_and_mul": {"n": 8192},
    "activation.gelu_tanh_and_mul": {"n": 8192},
    "embedding.lookup": {"vocab_size": 32768, "hidden": 4096},
    "sampling.argmax": {"vocab_size": 151936},
    "sampling.draw": {"vocab_size": 151936},
    "attention.decode": {"context": 1024, "q_heads": 32, "kv_heads": 8, "head_dim": 128},
}
#: Bytes that the calls of a graph read of distinct weights, so that none is still in a cache when it is read.
_DISTINCT = 512 * 2**20


def arguments_for(
    operation: str, rows: int, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device
) -> list[Any]:
    """Arguments of one call with random contents. Raises ``ConfigError`` for an operation that has no sizes here, or an unknown size."""
    if operation not in SIZES:
        raise ConfigError(f"kernels bench {operation}: it can be timed for {', '.join(SIZES)}")
    unknown = set(sizes) - set(SIZES[operation])
    if unknown:
        raise ConfigError(f"--shape {sorted(unknown)[0]}: {operation} has the sizes {', '.join(SIZES[operation])}")
    s = {**SIZES[operation], **sizes}

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, device=device).mul_(0.1).to(dtype)

    family, _, mode = operation.partition(".")
    if family == "gemm":
        return [randn(rows, s["k"]), randn(s["n"], s["k"])]
    if family == "norm":
        residual = [randn(rows, s["hidden"])] if mode == "add_rms_norm" else []
        return [randn(rows, s["hidden"]), *residual, randn(s["hidden"]), 1e-6]
    if family == "activation":
        return [randn(rows, s["n"])]
    if family == "embedding":
        return [torch.arange(rows, device=device), randn(s["vocab_size"], s["hidden"])]
    if family == "sampling":
        logits = randn(rows, s["vocab_size"]) * 30
        if mode == "argmax":
            return [logits]
        wide = [torch.full((rows,), value, dtype=torch.float64, device=device) for value in (1.0, 0.95, 0.0)]
        top_k = torch.full((rows,), 50, device=device)
        index = torch.arange(rows, device=device)
        return [logits, index, wide[0], top_k, wide[1], wide[2], index, index]
    pages = -(-s["context"] // 64)
    shape = (rows * pages, 64, s["kv_heads"], s["head_dim"])
    table = torch.arange(rows * pages, dtype=torch.int32, device=device).view(rows, pages)
    lens = torch.full((rows,), s["context"], dtype=torch.int32, device=device)
    q = randn(rows, s["q_heads"], s["head_dim"])
    return [q, randn(*shape), randn(*shape), table, lens, 1, s["head_dim"] ** -0.5, "NHD"]


def time_calls(
    kernel: Callable[..., Any], make: Callable[[], list[Any]], device: torch.device, seconds: float = 0.3
) -> float:
    """Microseconds of one call: the median of several rounds over arguments that do not fit into a cache.

    Args:
        make: new arguments.
        seconds: about how long to time on the CPU.
    """
    first = make()
    nbytes = max(1, sum(a.numel() * a.element_size() for a in first if isinstance(a, torch.Tensor)))
    many = 32 if device.type != "cpu" else 4
    sets = [first, *(make() for _ in range(min(many, _DISTINCT // nbytes)))]
    with torch.inference_mode():
        for arguments in sets:
            kernel(*arguments)
        if device.type == "cpu":
            return _on_host(kernel, sets, seconds)
        return _on_device(kernel, sets)


def _on_host(kernel: Callable[..., Any], sets: Sequence[list[Any]], seconds: float) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        began = time.perf_counter()
        for arguments in sets:
            kernel(*arguments)
        times.append((time.perf_counter() - began) / len(sets))
    return statistics.median(times) * 1e6


def _on_device(kernel: Callable[..., Any], sets: Sequence[list[Any]]) -> float:
    """In a captured graph; queued one by one where the kernel waits for the device, which cannot be captured."""

    def every() -> None:
        for arguments in sets:
            kernel(*arguments)

    torch.cuda.synchronize()
    replay: Callable[[], None] = every
    if not _waits(every):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            every()
        replay = graph.replay
    times: list[float] = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(sets))
    return statistics.median(times[1:])


def _waits(run: Callable[[], None]) -> bool:
    """Whether the host waits for the device in ``run``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not find every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False

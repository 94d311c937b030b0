"""Times kernels of one operation beside each other, on the CPU or in captured graphs on a device."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["time_calls"]

#: Bytes that the calls of a graph read of distinct weights, so that none is still in a cache when it is read.
_DISTINCT = 512 * 2**20


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

"""A progress bar while weights are read; silent where nobody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TextIO

import torch

__all__ = ["with_progress"]

_WIDTH = 28
_INTERVAL_S = 0.1


def with_progress(
    weights: Iterator[tuple[str, torch.Tensor]],
    total: int,
    *,
    label: str = "Loading weights",
    stream: TextIO | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass ``weights`` through, drawing tensors and bytes on ``stream`` (stderr) if it is a terminal."""
    out = stream or sys.stderr
    if not out.isatty():
        yield from weights
        return
    begun, drawn, bytes_read, count = time.monotonic(), 0.0, 0, 0
    for count, (name, tensor) in enumerate(weights, 1):
        yield name, tensor
        bytes_read += tensor.nbytes
        now = time.monotonic()
        if now - drawn >= _INTERVAL_S:
            drawn = now
            _draw(out, label, count, total, bytes_read, now - begun)
    _draw(out, label, count, total, bytes_read, time.monotonic() - begun)
    out.write("\n")
    out.flush()


def _draw(out: TextIO, label: str, count: int, total: int, bytes_read: int, seconds: float) -> None:
    filled = _WIDTH * count // max(total, 1)
    bar = "#" * filled + "." * (_WIDTH - filled)
    out.write(f"\r{label} [{bar}] {count}/{total}  {bytes_read / 1e9:.2f} GB  {seconds:.1f} s")
    out.flush()

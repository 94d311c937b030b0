"""Fast CPU kernels: one C++ extension, the instruction set chosen at run time, threads of its own."""

from __future__ import annotations

__all__: list[str] = []

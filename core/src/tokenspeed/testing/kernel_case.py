"""One call of a kernel, as conformance suites make it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["KernelCase", "randn"]


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One call of a kernel.

    Attributes:
        name: unique within family and mode.
        make: ``(generator) -> arguments``, fp32 where floating; the suite converts them.
        features: what the kernel must declare for the case to apply.
        shape: traits of the case, compared with the spec's limits.
        layout: KV layout, or empty.
        written: indices of the arguments that the kernel may change.
        keep: indices of floating arguments that stay fp32 whatever the element type.
        kwargs: keyword arguments.
    """

    name: str
    make: Callable[[torch.Generator], list[Any]]
    features: frozenset[str] = frozenset()
    shape: dict[str, int] = field(default_factory=dict)
    layout: str = ""
    written: frozenset[int] = frozenset()
    keep: frozenset[int] = frozenset()
    kwargs: dict[str, Any] = field(default_factory=dict)


def randn(g: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed fp32 values of deviation ``scale``."""
    return torch.randn(*shape, generator=g) * scale

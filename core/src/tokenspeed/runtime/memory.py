"""What this rank has allocated, by tag, so that sizes can be told and a platform can release one kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

__all__ = ["MemoryLedger", "Tag"]

Tag = Literal["weights", "kv", "graphs"]


class MemoryLedger:
    """Tensors by tag. Storage shared by several tensors (tied weights, views) counts once."""

    def __init__(self) -> None:
        self._tensors: dict[Tag, list[torch.Tensor]] = {}

    def add(self, tag: Tag, tensors: Iterable[torch.Tensor]) -> None:
        """Record tensors under ``tag``."""
        self._tensors.setdefault(tag, []).extend(tensors)

    def tensors(self, tag: Tag) -> tuple[torch.Tensor, ...]:
        """What was recorded under ``tag``."""
        return tuple(self._tensors.get(tag, ()))

    def nbytes(self, tag: Tag) -> int:
        """Bytes of distinct storage under ``tag``."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors(tag)}
        return sum(storages.values())

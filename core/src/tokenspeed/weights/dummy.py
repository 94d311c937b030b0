"""Random weights, the same for one model and seed whatever the number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from tokenspeed.interfaces.model import WeightSlot

__all__ = ["SlotOwner", "count_slots", "dummy_weights"]

_SPREAD = 0.02


class SlotOwner(Protocol):
    """A module that lists its weight slots."""

    def weight_slots(self) -> Iterable[WeightSlot]:
        """The module's slots."""


def dummy_weights(model: torch.nn.Module, *, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint for ``model``: normal(0, 0.02) fp32 for each slot, scales around 1, drawn where the model's parameters live.

    Every tensor has a generator of its own, seeded by its name, so that it does not depend on what else there is or on the rank's share. Kinds of device
    draw different numbers.
    """
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    for slot in _slots(model):
        digest = hashlib.sha256(f"{seed}:{slot.name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        tensor = torch.randn(slot.shape, generator=generator, device=device).mul_(_SPREAD)
        yield slot.name, tensor.add_(1.0) if slot.ones else tensor


def count_slots(model: torch.nn.Module) -> int:
    """Tensors that ``dummy_weights`` draws."""
    return sum(1 for _ in _slots(model))


def _slots(model: torch.nn.Module) -> Iterator[WeightSlot]:
    for module in model.modules():
        if (slots := getattr(module, "weight_slots", None)) is not None:
            yield from slots()

"""From a stream of named tensors into a model's weight slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from tokenspeed.errors import ModelError
from tokenspeed.interfaces.model import WeightSlot

__all__ = ["check_complete", "iterate_slots", "load_weights"]


def iterate_slots(model: nn.Module) -> Iterator[tuple[str, WeightSlot]]:
    """Every slot of every module, with the full name of the parameter behind it."""
    for name, module in model.named_modules():
        slots: Callable[[], Iterable[WeightSlot]] | None = getattr(module, "weight_slots", None)
        if slots is not None:
            for slot in slots():
                yield (f"{name}.{slot.parameter}" if name else slot.parameter), slot


def load_weights(
    model: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    ignore: Callable[[str], bool] | None = None,
) -> set[str]:
    """Copy each tensor to its place, one at a time, so that the stream may drop it at once.

    Args:
        ignore: says of a checkpoint name that has no slot that it is known and not needed.

    Returns:
        Names of the parameters that were filled, fused ones only when all their parts came.

    Raises:
        ModelError: a tensor has no place in the model, comes twice, or has the wrong shape.
    """
    table: dict[str, tuple[str, WeightSlot]] = {
        slot.name: (parameter, slot) for parameter, slot in iterate_slots(model)
    }
    open_parts = Counter(parameter for parameter, _ in table.values())
    seen: set[str] = set()
    with torch.no_grad():
        for name, tensor in weights:
            entry = table.get(name)
            if entry is None:
                if ignore is not None and ignore(name):
                    continue
                raise ModelError(
                    f"the checkpoint's tensor {name!r} {tuple(tensor.shape)} has no place in {type(model).__name__}"
                )
            if name in seen:
                raise ModelError(f"the checkpoint holds {name!r} twice")
            seen.add(name)
            parameter, slot = entry
            if tuple(tensor.shape) != slot.shape:
                raise ModelError(
                    f"the checkpoint's {name!r} has shape {tuple(tensor.shape)}, its config.json implies {slot.shape}"
                )
            slot.load(tensor)
            open_parts[parameter] -= 1
    for module in model.modules():
        finish: Callable[[], None] | None = getattr(module, "finish_loading", None)
        if finish is not None:
            finish()
    return {parameter for parameter, left in open_parts.items() if left == 0}


def check_complete(model: nn.Module, filled: set[str]) -> None:
    """Raise ``ModelError`` naming the checkpoint's tensors that did not come, unless every parameter is in ``filled``."""
    missing = [slot.name for parameter, slot in iterate_slots(model) if parameter not in filled]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors that {type(model).__name__} needs: {shown}")

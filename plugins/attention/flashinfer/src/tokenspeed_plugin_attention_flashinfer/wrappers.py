"""FlashInfer's wrappers and when they may be planned again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed.errors import PluginError

__all__ = ["Turns", "library", "upload"]


def library() -> Any:
    """The module ``flashinfer``.

    Raises:
        PluginError: it cannot be imported, cause first.
    """
    try:
        import flashinfer
    except Exception as error:  # it loads shared libraries and asks for a device
        raise PluginError(f"{type(error).__name__}: {error}\nflashinfer cannot be imported") from error
    return flashinfer


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``host`` on ``device`` without waiting for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class Turns:
    """Wrappers of one class: two for each set of constants of the layers (scale, softcap, window), which take turns from step to step.

    Planning fills a pinned buffer whose copy to the device is only queued: the buffer may be filled again when the step before last has ended, and never
    within a step.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._pairs: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._planned: set[tuple[Any, ...]] = set()
        self._turn = 0

    def next_step(self) -> None:
        """Forget the step's plans."""
        if self._planned:
            self._turn ^= 1
            self._planned.clear()

    def planned(self, constants: tuple[Any, ...], plan: Callable[[Any], None]) -> Any:
        """The wrapper for layers with ``constants``, which ``plan`` is called with once a step."""
        pair = self._pairs.get(constants)
        if pair is None:
            pair = self._pairs[constants] = (self._make(), self._make())
        if constants not in self._planned:
            plan(pair[self._turn])
            self._planned.add(constants)
        return pair[self._turn]

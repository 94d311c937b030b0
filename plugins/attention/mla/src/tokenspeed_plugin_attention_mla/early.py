"""Programmatic dependent launch (NVIDIA, compute capability 9.0 on): a kernel begins while the one before it ends.

A kernel that is launched so lets the next one begin at once (``gdc_launch_dependents``), reads only what no kernel of the step writes (weights, tables
made before the first layer), and then waits for its predecessor (``gdc_wait``). Each waits, so whoever has waited sees everything that came before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["early_launch"]


@functools.cache
def _options(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def early_launch(tensor: torch.Tensor) -> dict[str, Any]:
    """Launch arguments of a kernel with the constant ``PDL`` that works on ``tensor``'s device."""
    return _options(tensor.device)

"""Copies between host and device that no one waits for.

Host memory comes pinned from torch's caching host allocator, which hands a block out again only when the copies that were queued on it have ended: a buffer
can be dropped, or the next step staged, while the device is still reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Download", "to_device", "upload", "upload_into"]

_ALIGN = 16
_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """``array`` as a tensor on ``device``; on the host the two share memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Several one-dimensional arrays in one transfer; on the host the tensors share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // _ALIGN) * _ALIGN
    staging = torch.empty(max(end, _ALIGN), dtype=torch.uint8, pin_memory=True)
    host = staging.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        host[offset : offset + array.nbytes] = array.view(np.uint8)
    raw = staging.to(device, non_blocking=True)
    return [
        raw[offset : offset + array.nbytes].view(_DTYPES[array.dtype])
        for array, offset in zip(arrays, offsets, strict=True)
    ]


def upload_into(target: torch.Tensor, array: npt.NDArray[Any]) -> None:
    """Overwrite the first ``len(array)`` elements of a one-dimensional ``target``."""
    tensor = torch.from_numpy(array)
    if target.device.type != "cpu":
        tensor = tensor.pin_memory()
    target[: len(array)].copy_(tensor, non_blocking=True)


class Download:
    """A device tensor on its way to the host.

    Args:
        tensor: may be overwritten by work that is queued later.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.Event | None = None
        if tensor.device.type == "cpu":
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.Event(tensor.device.type)
        self._event.record()

    def wait(self) -> npt.NDArray[Any]:
        """Block until the copy has ended; its values."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host.numpy()

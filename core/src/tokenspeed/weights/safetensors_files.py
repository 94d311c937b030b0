"""Tensors of safetensors files, one at a time, from a memory map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from safetensors import SafetensorError, safe_open

from tokenspeed.errors import ModelError

__all__ = ["count_safetensors", "iterate_safetensors"]


def count_safetensors(files: Sequence[str]) -> int:
    """Tensors in all files."""
    total = 0
    for path in files:
        with _open(path) as shard:
            total += len(shard.keys())
    return total


def iterate_safetensors(files: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor in file order. A tensor is valid until the next one is asked for.

    Raises:
        ModelError: a file cannot be read.
    """
    for path in files:
        with _open(path) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                yield name, shard.get_tensor(name)


def _open(path: str) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error}; download it again") from error

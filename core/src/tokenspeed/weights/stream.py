"""The weights of a described checkpoint as a stream, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenspeed.weights.describe import ModelDescription
from tokenspeed.weights.dummy import count_slots, dummy_weights
from tokenspeed.weights.gguf_file import GgufFile
from tokenspeed.weights.gguf_weights import iterate_gguf
from tokenspeed.weights.progress import with_progress
from tokenspeed.weights.safetensors_files import count_safetensors, iterate_safetensors

__all__ = ["iterate_weights"]


def iterate_weights(
    description: ModelDescription, *, model: torch.nn.Module | None = None, seed: int = 0, progress: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint name and tensor, in file order, in the element type of the file (fp32 where it was quantised).

    Args:
        model: needed for ``dummy``, whose shapes are the model's.
        seed: of ``dummy`` weights.
        progress: draw a bar on a terminal.

    Raises:
        ModelError: a file cannot be read.
        ValueError: ``dummy`` without a model.
    """
    files = description.weight_files
    if description.format == "dummy":
        if model is None:
            raise ValueError("dummy weights need the model")
        drawn = dummy_weights(model, seed=seed)
        return with_progress(drawn, count_slots(model), label="Drawing weights") if progress else drawn
    if description.format == "gguf":
        weights = iterate_gguf(files[0])
        if progress:
            with GgufFile(files[0]) as file:
                return with_progress(weights, len(file.tensors))
        return weights
    weights = iterate_safetensors(files)
    return with_progress(weights, count_safetensors(files)) if progress else weights

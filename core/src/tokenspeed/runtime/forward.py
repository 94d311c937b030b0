"""How a batch is run through the model. The seam for captured graphs, which are keyed by (rows, decode width)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tokenspeed.interfaces.attention import AttentionBackend
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.interfaces.model import CausalLM

__all__ = ["Forward", "eager"]

#: Hidden states (tokens, hidden) of a batch.
Forward = Callable[[ForwardBatch], torch.Tensor]


def eager(model: CausalLM, backends: Iterable[AttentionBackend]) -> Forward:
    """Run every operation as it comes. ``backends`` are those the model's attention layers are bound to, each once."""
    distinct = list(dict.fromkeys(backends))

    def forward(batch: ForwardBatch) -> torch.Tensor:
        for backend in distinct:
            backend.init_forward_metadata(batch)
        hidden: torch.Tensor = model(batch)
        return hidden

    return forward

"""Recurrent layers: each sequence has a state of fixed size that its tokens step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import torch
from torch import nn

from tokenspeed.errors import ModelError
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.layers.module import Layer
from tokenspeed.types import CacheGroup

__all__ = ["RecurrentLayer", "StateSource", "bind_states"]


class StateSource(Protocol):
    """What recurrent layers need of the KV pool."""

    @property
    def groups(self) -> Sequence[CacheGroup]:
        """The model's cache groups."""

    def states(self, index: int) -> tuple[torch.Tensor, ...]:
        """States of one layer; each tensor is (states + 1, ...)."""


class RecurrentLayer(Layer):
    """Base of layers with states. They come zeroed, or as another request left them at a multiple of the group's interval; the layer reads the state of a
    row and leaves there what it is behind the row's last token.

    Attributes:
        captures: a step of decodes may be captured: ``forward`` launches the same work whatever the rows are, and reads on the device alone which state is
            whose (``batch.slot_mapping[group_index]``, one a token). Rows that fill such a step up share a state that is no request's.
        captures_extend: the same of a step with pieces of prompts, whose rows may be empty.
        states: the tensors of this layer, (states + 1, ...) each, the last one no request's; empty until ``bind_states``.
        group_index: its cache group, once bound.
    """

    captures: ClassVar[bool] = False
    captures_extend: ClassVar[bool] = False

    def __init__(self, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.group_index = -1
        self.states: tuple[torch.Tensor, ...] = ()

    def rows(self, batch: ForwardBatch) -> Iterator[tuple[int, int, int]]:
        """(state, first token, last token + 1) of each row."""
        states, starts = batch.page_tables[self.group_index][:, 0].tolist(), batch.query_start.tolist()
        return zip(states, starts[:-1], starts[1:], strict=True)


def bind_states(model: nn.Module, source: StateSource) -> None:
    """Give every recurrent layer of ``model`` its states.

    Raises:
        ModelError: a layer is in no recurrent cache group.
    """
    group_of = {
        layer: index for index, group in enumerate(source.groups) if group.kind == "recurrent" for layer in group.layers
    }
    for module in model.modules():
        if isinstance(module, RecurrentLayer):
            if module.layer_index not in group_of:
                raise ModelError(
                    f"{type(model).__name__} declares no recurrent cache group for layer {module.layer_index}"
                )
            module.group_index = group_of[module.layer_index]
            module.states = source.states(module.layer_index)

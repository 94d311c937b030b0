"""How a linear layer keeps and applies its weight. Unquantised is the first method; others come with their checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tokenspeed.errors import ModelError
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.layers.dtypes import short_name

if TYPE_CHECKING:
    from tokenspeed.layers.linear import Linear

__all__ = ["QuantizationMethod", "SelectKernel", "Unquantized", "quantization_for"]

SelectKernel = Callable[[KernelRequest], Callable[..., Any]]


class QuantizationMethod(ABC):
    """Makes, loads and applies the weights of linear layers."""

    name: str = ""

    @abstractmethod
    def create(self, layer: Linear) -> None:
        """Register the layer's parameters: ``layer.out_local`` x ``layer.in_local`` elements."""

    @abstractmethod
    def load(self, layer: Linear, kind: str, part: int, tensor: torch.Tensor) -> None:
        """Copy this rank's share of one checkpoint tensor. ``kind`` is ``weight`` or ``bias``; ``part`` indexes ``layer.parts``."""

    def finish(self, layer: Linear) -> None:
        """After loading: repack, for example. Called after every load, so doing it twice must be harmless."""

    @abstractmethod
    def bind(self, layer: Linear, select: SelectKernel) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function from input to output, its kernel chosen now, once."""


class Unquantized(QuantizationMethod):
    """Weights as they lie in the checkpoint, in the model's element type."""

    name = "unquantized"

    def create(self, layer: Linear) -> None:
        weight = torch.empty(layer.out_local, layer.in_local, dtype=layer.dtype, device=layer.device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        bias = torch.empty(layer.out_local, dtype=layer.dtype, device=layer.device) if layer.has_bias else None
        layer.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def load(self, layer: Linear, kind: str, part: int, tensor: torch.Tensor) -> None:
        place = layer.places[part]
        rows = slice(place.offset, place.offset + place.out.local)
        taken = tensor[place.out.begin : place.out.begin + place.out.count]
        if kind == "bias":
            assert layer.bias is not None
            target = layer.bias[rows]
            if layer.shard == "row" and layer.group.rank > 0:  # partial outputs are summed: one rank adds the bias
                target.zero_()
                return
        else:
            target = layer.weight[rows]
            cut = layer.in_slice
            taken = taken[:, cut.begin : cut.begin + cut.count]
            if cut.count < cut.local:
                target[:, cut.count :].zero_()
                target = target[:, : cut.count]
        target[: place.out.count].copy_(taken)
        if place.out.count < place.out.local:
            target[place.out.count :].zero_()

    def bind(self, layer: Linear, select: SelectKernel) -> Callable[[torch.Tensor], torch.Tensor]:
        shape = {"n": layer.out_local, "k": layer.in_local}
        dtype = short_name(layer.dtype)
        # Weights are only ever written in place, so the tensors themselves can be held: attribute look-ups of nn.Module cost more than the call.
        weight, bias = layer.weight.data, None if layer.bias is None else layer.bias.data
        kernel = select(KernelRequest(family="gemm", mode=layer.mode, dtype=dtype, shape=shape))

        def apply(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = kernel(x, weight, bias)
            return out

        return apply


def quantization_for(config: Mapping[str, Any]) -> QuantizationMethod:
    """The method that ``config.json`` asks for.

    Raises:
        ModelError: the checkpoint is quantised in a way that nothing here reads.
    """
    wanted = config.get("quantization_config")
    if not wanted:
        return Unquantized()
    method = wanted.get("quant_method", "unknown") if isinstance(wanted, Mapping) else wanted
    raise ModelError(
        f"the checkpoint is quantised ({method!r}), which is not supported; use its unquantised version or a GGUF file"
    )

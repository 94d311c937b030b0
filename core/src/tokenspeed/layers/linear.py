"""Linear layers: fused along the output, sharded along either axis, applied by a quantization method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from tokenspeed.interfaces.model import WeightSlot
from tokenspeed.layers.module import Layer
from tokenspeed.layers.parallel import ParallelGroup, ShardSlice, shard_slice
from tokenspeed.layers.quantization import QuantizationMethod, SelectKernel

__all__ = ["Linear", "PartPlace"]

_SHARDS = ("column", "row", "replicated")


@dataclass(frozen=True)
class PartPlace:
    """One fused part: the checkpoint's tensor ``name`` with ``size`` output rows, of which ``out`` stands at row ``offset`` here."""

    name: str
    size: int
    offset: int
    out: ShardSlice


class Linear(Layer):
    """``forward(x (T, in_local)) -> (T, out_local)``.

    Attributes:
        weight, bias: parameters of the quantization method (unquantised: (out_local, in_local) and (out_local)).
        places: the fused parts in order.
        in_slice: this rank's part of the input axis.
        mode: mode of the gemm kernel that applies it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        prefix: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        shard: str,
        group: ParallelGroup,
        parts: Sequence[tuple[str, int]],
        units: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        method: QuantizationMethod,
        select: SelectKernel,
        memory: AbstractContextManager[None],
        mode: str = "linear",
    ) -> None:
        super().__init__()
        if shard not in _SHARDS:
            raise ValueError(f"{prefix}: shard {shard!r} is not one of {', '.join(_SHARDS)}")
        owner, _, _ = prefix.rpartition(".")
        named = [(f"{owner}.{name}" if owner else name, size) for name, size in parts] or [(prefix, out_features)]
        if sum(size for _, size in named) != out_features:
            raise ValueError(f"{prefix}: the parts {list(parts)} do not add up to {out_features}")
        self.shard, self.group, self.mode = shard, group, mode
        self.dtype, self.device, self.has_bias = dtype, device, bias
        self.in_features = in_features
        blocks = list(units) if units else [size for _, size in named] if shard == "column" else [in_features]
        self.places: list[PartPlace] = []
        offset = 0
        for index, (name, size) in enumerate(named):
            cut = (
                shard_slice(size, blocks[index], group.rank, group.size)
                if shard == "column"
                else ShardSlice(size, 0, size)
            )
            self.places.append(PartPlace(name, size, offset, cut))
            offset += cut.local
        self.out_local = offset
        self.in_slice = (
            shard_slice(in_features, blocks[0], group.rank, group.size)
            if shard == "row"
            else ShardSlice(in_features, 0, in_features)
        )
        self.in_local = self.in_slice.local
        self._method = method
        with memory:
            method.create(self)
        self._apply_weight = method.bind(self, select)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply_weight(x)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """One slot for each checkpoint tensor."""
        for index, place in enumerate(self.places):
            for kind in ("weight", "bias") if self.has_bias else ("weight",):
                shape = (place.size, self.in_features) if kind == "weight" else (place.size,)
                load = partial(self._method.load, self, kind, index)
                yield WeightSlot(name=f"{place.name}.{kind}", parameter=kind, shape=shape, load=load)

    def finish_loading(self) -> None:
        """Let the quantization method post-process; harmless when repeated."""
        self._method.finish(self)

    def extra_repr(self) -> str:
        return f"in={self.in_local}, out={self.out_local}, shard={self.shard}, method={self._method.name}"

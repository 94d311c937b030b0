"""Root-mean-square norm with the residual addition, and the reduction of a partial input, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn

from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.interfaces.model import WeightSlot
from tokenspeed.layers.dtypes import short_name
from tokenspeed.layers.module import Layer
from tokenspeed.layers.parallel import ParallelGroup
from tokenspeed.layers.quantization import SelectKernel

__all__ = ["RMSNorm"]


class RMSNorm(Layer):
    """``forward(x, residual=None) -> (normed, residual)``, both (T, hidden).

    With a residual: sums partial ``x`` over ``reduce`` (where that has more than one rank), adds it to ``residual`` in place, norms the sum. A fused
    all-reduce + add + norm kernel can take this module's place whole.
    """

    def __init__(
        self,
        prefix: str,
        hidden: int,
        eps: float,
        *,
        reduce: ParallelGroup | None,
        dtype: torch.dtype,
        device: torch.device,
        select: SelectKernel,
        memory: AbstractContextManager[None],
    ) -> None:
        super().__init__()
        self._prefix, self._eps = prefix, eps
        with memory:
            self.weight = nn.Parameter(torch.ones(hidden, dtype=dtype, device=device), requires_grad=False)
        self._scale = self.weight.data
        self._reduce = reduce.all_reduce if reduce is not None and reduce.size > 1 else None
        request = {"family": "norm", "dtype": short_name(dtype), "shape": {"hidden": hidden}}
        self._norm = select(KernelRequest(mode="rms_norm", **request))  # type: ignore[arg-type]
        self._add_norm = select(KernelRequest(mode="add_rms_norm", **request))  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if self._reduce is not None:
            x = self._reduce(x)
        if residual is None:
            return self._norm(x, self._scale, self._eps), x
        pair: tuple[torch.Tensor, torch.Tensor] = self._add_norm(x, residual, self._scale, self._eps)
        return pair

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The scale."""
        yield WeightSlot(
            name=f"{self._prefix}.weight",
            parameter="weight",
            shape=tuple(self.weight.shape),
            load=self._load,
            ones=True,
        )

    def _load(self, tensor: torch.Tensor) -> None:
        self._scale.copy_(tensor)

"""Token embedding and output head, both sharded along the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn

from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.interfaces.model import WeightSlot
from tokenspeed.layers.dtypes import short_name
from tokenspeed.layers.module import Layer
from tokenspeed.layers.parallel import ParallelGroup, ShardSlice, shard_slice
from tokenspeed.layers.quantization import SelectKernel

__all__ = ["Embedding", "LMHead"]


def _load_rows(target: torch.Tensor, cut: ShardSlice, tensor: torch.Tensor) -> None:
    target[: cut.count].copy_(tensor[cut.begin : cut.begin + cut.count])
    if cut.count < cut.local:
        target[cut.count :].zero_()


class Embedding(Layer):
    """``forward(ids (T) int64) -> (T, hidden)``, complete on every rank."""

    def __init__(
        self,
        prefix: str,
        vocab_size: int,
        hidden: int,
        *,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
        select: SelectKernel,
        memory: AbstractContextManager[None],
    ) -> None:
        super().__init__()
        self._prefix, self._group, self.vocab_size = prefix, group, vocab_size
        self.rows = shard_slice(vocab_size, vocab_size, group.rank, group.size)
        with memory:
            weight = torch.empty(self.rows.local, hidden, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._table = self.weight.data
        shape = {"hidden": hidden, "vocab": self.rows.local}
        self._lookup = select(KernelRequest(family="embedding", mode="lookup", dtype=short_name(dtype), shape=shape))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self._group.size == 1:
            out: torch.Tensor = self._lookup(ids, self._table)
            return out
        local = ids - self.rows.begin
        elsewhere = (local < 0) | (local >= self.rows.count)
        out = self._lookup(local.masked_fill(elsewhere, 0), self._table)
        return self._group.all_reduce(out.masked_fill_(elsewhere.unsqueeze(-1), 0.0))

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The table."""
        shape = (self.vocab_size, self._table.shape[1])
        yield WeightSlot(name=f"{self._prefix}.weight", parameter="weight", shape=shape, load=self._load)

    def _load(self, tensor: torch.Tensor) -> None:
        _load_rows(self._table, self.rows, tensor)


class LMHead(Layer):
    """``forward(x (R, hidden)) -> (R, vocab)``, complete on every rank; ``tied`` shares its table."""

    def __init__(
        self,
        prefix: str,
        vocab_size: int,
        hidden: int,
        *,
        tied: Embedding | None,
        bias: bool,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
        select: SelectKernel,
        memory: AbstractContextManager[None],
    ) -> None:
        super().__init__()
        self._prefix, self._group, self.vocab_size, self._tied = prefix, group, vocab_size, tied is not None
        self.rows = shard_slice(vocab_size, vocab_size, group.rank, group.size)
        with memory:
            made = None if tied else torch.empty(self.rows.local, hidden, dtype=dtype, device=device)
            offsets = torch.empty(self.rows.local, dtype=dtype, device=device) if bias else None
        # A tied head registers no parameter of its own: the table is the embedding's, under the embedding's name.
        self.register_parameter("weight", None if made is None else nn.Parameter(made, requires_grad=False))
        self.register_parameter("bias", None if offsets is None else nn.Parameter(offsets, requires_grad=False))
        self._table = tied.weight.data if tied is not None else made
        self._offsets = offsets
        shape = {"n": self.rows.local, "k": hidden}
        self._kernel = select(KernelRequest(family="gemm", mode="linear", dtype=short_name(dtype), shape=shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._kernel(x, self._table, self._offsets)
        if self._group.size == 1:
            return out
        return self._group.all_gather(out)[:, : self.vocab_size]

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The table unless tied, and the bias if there is one."""
        if not self._tied and self._table is not None:
            shape = (self.vocab_size, self._table.shape[1])
            yield WeightSlot(name=f"{self._prefix}.weight", parameter="weight", shape=shape, load=self._load_table)
        if self._offsets is not None:
            yield WeightSlot(
                name=f"{self._prefix}.bias", parameter="bias", shape=(self.vocab_size,), load=self._load_bias
            )

    def _load_table(self, tensor: torch.Tensor) -> None:
        assert self._table is not None
        _load_rows(self._table, self.rows, tensor)

    def _load_bias(self, tensor: torch.Tensor) -> None:
        assert self._offsets is not None
        _load_rows(self._offsets, self.rows, tensor)

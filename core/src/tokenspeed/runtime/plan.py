"""What the executor needs of a plan: the scheduler's ``ExecutionPlan`` has these attributes, and so has its copy on the other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tokenspeed.messages.to_engine import SamplingParams
from tokenspeed.runtime.cache_ops import CacheOps

__all__ = ["NEW_IN_SLOT", "SAMPLES", "PlanArrays", "PlanView", "SlotGrammar", "SlotRequest"]

Int32 = npt.NDArray[np.int32]

#: Flag bits of a row.
SAMPLES = 1
NEW_IN_SLOT = 2


class PlanView(Protocol):
    """The flat arrays of one plan; shapes and meanings as in the scheduler's ``ExecutionPlan``. Rows: extends first, then decodes."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_extend_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def slots(self) -> Int32: ...
    @property
    def context_lens(self) -> Int32: ...
    @property
    def query_lens(self) -> Int32: ...
    @property
    def input_ids(self) -> Int32: ...
    @property
    def flags(self) -> Int32: ...
    @property
    def output_lens(self) -> Int32: ...
    @property
    def delta_group(self) -> Int32: ...
    @property
    def delta_slot(self) -> Int32: ...
    @property
    def delta_index(self) -> Int32: ...
    @property
    def delta_page(self) -> Int32: ...
    @property
    def state_kind(self) -> Int32: ...
    @property
    def state_group(self) -> Int32: ...
    @property
    def state_source(self) -> Int32: ...
    @property
    def state_target(self) -> Int32: ...
    @property
    def prefix_intervals(self) -> Int32: ...


def _none() -> Int32:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, kw_only=True)
class PlanArrays:
    """A ``PlanView`` made of plain arrays."""

    num_rows: int
    num_extend_rows: int
    num_tokens: int
    slots: Int32
    context_lens: Int32
    query_lens: Int32
    input_ids: Int32
    flags: Int32
    output_lens: Int32
    delta_group: Int32
    delta_slot: Int32
    delta_index: Int32
    delta_page: Int32
    prefix_intervals: Int32
    state_kind: Int32 = field(default_factory=_none)
    state_group: Int32 = field(default_factory=_none)
    state_source: Int32 = field(default_factory=_none)
    state_target: Int32 = field(default_factory=_none)
    cache_ops: CacheOps | None = None


class SlotGrammar(msgspec.Struct, array_like=True, frozen=True):
    """A compiled grammar on its way to the slots of every rank.

    Attributes:
        key: hash of its kind and text: the same key, the same grammar.
        compiled: what the backend's ``serialize`` made.
        reasoning_end: ids after which it begins; empty is from the first token on.
    """

    key: bytes
    compiled: bytes
    reasoning_end: tuple[int, ...] = ()


class SlotRequest(msgspec.Struct, array_like=True, frozen=True):
    """What the executor must know of a request that begins in ``slot`` (its first row there carries ``NEW_IN_SLOT``).

    Attributes:
        params: how its tokens are drawn.
        seed: 64-bit key of its noise, as a signed integer.
        end_ids: ids masked before ``params.min_tokens``.
        prompt: little-endian int32 ids of the prompt.
        output: little-endian int32 ids generated before it lost its former slot; empty at first admission.
        id: the same for one request however often it changes slots.
    """

    slot: int
    params: SamplingParams
    seed: int
    end_ids: tuple[int, ...]
    prompt: bytes
    output: bytes = b""
    id: int = 0
    grammar: SlotGrammar | None = None

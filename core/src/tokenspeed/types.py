"""Names that every layer shares. Imports nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

__all__ = ["CacheGroup", "FinishReason", "KVLayout"]

_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class FinishReason(StrEnum):
    """Why a request ended, as its clients see it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class KVLayout(StrEnum):
    """Order of a paged KV cache's axes: ``NHD`` (pages, page_size, kv_heads, head_dim), ``HND`` (pages, kv_heads, page_size, head_dim)."""

    NHD = "NHD"
    HND = "HND"


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """A set of layers whose cache is allocated together, declared by the model.

    A model's first group is ``full``; one without full attention declares a full group without layers, whose pages cost nothing.

    Attributes:
        kind: ``full``, ``mla`` for latents (one row of ``head_dim`` elements a token, ``kv_heads`` 1, whose first ``v_head_dim`` elements are the value too),
            ``window`` (a token reads the last ``window`` tokens) or ``recurrent`` (a sequence has a state of fixed size).
        layers: the layer indices in the group.
        kv_heads: KV heads of one layer on this rank.
        head_dim: elements of a key head.
        v_head_dim: elements of a value head.
        window: tokens that a token reads, its own included; of window groups.
        states: shape of each tensor of a layer's state; of recurrent groups.
        state_dtypes: element type of each of them (``float32``, ``bfloat16``, ``float16``); left out, all are of the cache's type.
        interval: tokens between two states that can be kept for other requests, a multiple of the page size; of recurrent groups.
    """

    kind: str
    layers: tuple[int, ...]
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    window: int = 0
    states: tuple[tuple[int, ...], ...] = ()
    state_dtypes: tuple[str, ...] = ()
    interval: int = 0

    @property
    def keeps_all(self) -> bool:
        """Every token's page is kept, as of full attention."""
        return self.kind not in ("window", "recurrent")

    def bytes_per_token(self, element_bytes: int) -> int:
        """Bytes that one token of context takes in this group on this rank; of a recurrent group 0."""
        values = 0 if self.kind == "mla" else self.v_head_dim
        return len(self.layers) * self.kv_heads * (self.head_dim + values) * element_bytes

    def bytes_per_state(self, element_bytes: int) -> int:
        """Bytes of one state of all the group's layers on this rank; 0 where it has none."""
        own = [_STATE_BYTES[name] for name in self.state_dtypes] or [element_bytes] * len(self.states)
        return len(self.layers) * sum(prod(shape) * size for shape, size in zip(self.states, own, strict=True))

"""Names that every layer shares. Imports nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["CacheGroup", "FinishReason", "KVLayout"]


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

    Attributes:
        kind: ``full``, or ``mla`` for latents: one row of ``head_dim`` elements a token, ``kv_heads`` 1, whose first ``v_head_dim`` elements are the value
            too (window and recurrent groups arrive with the models that have them).
        layers: the layer indices in the group.
        kv_heads: KV heads of one layer on this rank.
        head_dim: elements of a key head.
        v_head_dim: elements of a value head.
    """

    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    v_head_dim: int

    def bytes_per_token(self, element_bytes: int) -> int:
        """Bytes that one token of context takes in this group on this rank."""
        values = 0 if self.kind == "mla" else self.v_head_dim
        return len(self.layers) * self.kv_heads * (self.head_dim + values) * element_bytes

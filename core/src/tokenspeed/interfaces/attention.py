"""Contract of an attention backend (``AttentionBackendSpec``, API 1).

A backend owns its metadata and workspace. Core owns the KV layout and has already written the step's keys and values into the pages when a
backend is called; the backend reads them through ``batch.page_tables``.

Multi-head latent attention (DeepSeek-V2, 2024), a group of kind ``mla``: every token has one latent of ``head_dim`` elements, for all heads. Its first
``v_head_dim`` elements (the rank) stand for keys without position and for values, the rest is the rotated key that the heads share. Queries come absorbed, that
is taken into the latents' space by the layer (``LatentUp.absorb``), so that attention is that of one KV head whose values are a part of its keys. For prompts,
where the heads' own keys and values are fewer than a latent's elements, there is ``forward_extend_heads``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenspeed.types import CacheGroup, KVLayout

if TYPE_CHECKING:
    import torch

    from tokenspeed.interfaces.batch import ForwardBatch
    from tokenspeed.interfaces.kernel import KernelRequest

__all__ = ["AttentionBackend", "AttentionContext", "AttentionLayer", "LatentUp", "LayerKV"]


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What a backend is built from.

    Attributes:
        q_heads: query heads of one layer on this rank.
        group: the cache group it serves; ``group_index`` is its index in the batch's per-group lists.
        layout: the layout of the pages it will see.
        page_size: tokens in a page.
        dtype: element type of queries; ``kv_dtype`` of the cache.
        max_rows: rows in a step at most; ``max_width`` query tokens of a decode row at most; ``max_tokens`` query tokens of a step at most.
        max_model_len: tokens of context at most.
        select_kernel: resolves a kernel of family ``attention``; raises ``PluginError`` with every candidate's reason when none fits.
        options: options of the plugin that contributes the backend.
    """

    q_heads: int
    group: CacheGroup
    group_index: int
    layout: KVLayout
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    max_rows: int
    max_tokens: int
    max_model_len: int
    select_kernel: Callable[[KernelRequest], Callable[..., Any]]
    max_width: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LatentUp:
    """How a latent becomes the keys and values of every head of one layer on this rank.

    Attributes:
        keys: (q_heads, nope_dim, rank), element type of the queries: key part without position.
        values: (q_heads, v_dim, rank).
    """

    keys: torch.Tensor
    values: torch.Tensor

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Queries of heads (T, q_heads, nope_dim + rope_dim) in the space of latents: (T, q_heads, rank + rope_dim)."""
        nope, rank = self.keys.shape[1:]
        out = q.new_empty(q.shape[0], q.shape[1], rank + q.shape[2] - nope)
        out[..., :rank] = (q[..., :nope].transpose(0, 1) @ self.keys).transpose(0, 1)
        out[..., rank:] = q[..., nope:]
        return out

    def project(self, out: torch.Tensor) -> torch.Tensor:
        """Sums of latents (T, q_heads, rank) as sums of the heads' values: (T, q_heads, v_dim)."""
        return (out.transpose(0, 1) @ self.values.transpose(1, 2)).transpose(0, 1).contiguous()


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """Constants of one layer: ``window`` 0 means unlimited; ``sinks`` is (q_heads) fp32 or ``None``; ``softcap`` 0 means none.

    Of groups of kind ``mla``: ``kv_scale`` is what stored latents are multiplied by, ``latent`` turns them into keys and values.
    """

    index: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    kv_scale: float = 1.0
    latent: LatentUp | None = None


@dataclass(kw_only=True)
class LayerKV:
    """One layer's pages, in the backend's layout and the cache's element type (``AttentionContext.layout``, ``kv_dtype``).

    Attributes:
        k: NHD: (pages, page_size, kv_heads, head_dim); HND: (pages, kv_heads, page_size, head_dim).
        v: as ``k``, with v_head_dim for head_dim; of a group of kind ``mla`` a view of ``k``'s first v_head_dim elements.
    """

    k: torch.Tensor
    v: torch.Tensor


class AttentionBackend(ABC):
    """Reads paged KV for one cache group. Not thread safe; one per engine rank."""

    def __init__(self, ctx: AttentionContext) -> None:
        self.ctx = ctx

    def bind_layers(self, layers: Sequence[AttentionLayer]) -> None:
        """Told before the first step, and again when the KV pool gets its place, which layers it will serve. One that chooses kernels by what layers need
        chooses them here, so that what cannot run fails at start and not in a request's step.

        Raises:
            PluginError: no kernel fits a layer.
        """

    def bind_pages(self, pages: Sequence[LayerKV]) -> None:
        """Told after ``bind_layers``, in the same order, where each layer's pages are: a pool of a few pages before the first step, and later the one that
        requests are served from. One that cannot read so many says so here, and not in a request's step.

        Raises:
            PluginError: the pool is not one that it reads.
        """

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare for a step, once for all its layers. Host arrays of ``batch.host`` may be read; the device must not be synchronised."""

    @abstractmethod
    def forward_extend(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """Causal attention of the extend rows.

        Args:
            q: (extend tokens, q_heads, head_dim).

        Returns:
            (extend tokens, q_heads, v_head_dim), element type of ``q``.
        """

    @abstractmethod
    def forward_decode(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """Attention of the decode rows, ``batch.decode_width`` causal query tokens each.

        Args:
            q: (decode rows * width, q_heads, head_dim).

        Returns:
            (decode rows * width, q_heads, v_head_dim), element type of ``q``.
        """

    def forward_extend_heads(
        self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """``forward_extend`` of a group of kind ``mla`` for queries that are not absorbed; ``layer.latent`` is given. A backend may expand the latents it reads
        instead of absorbing the queries, which is the default.

        Args:
            q: (extend tokens, q_heads, nope_dim + rope_dim), rotated.

        Returns:
            (extend tokens, q_heads, v_dim), element type of ``q``.
        """
        assert layer.latent is not None, "layers of latents bring their projections"
        return layer.latent.project(self.forward_extend(layer.latent.absorb(q), kv, layer, batch))

    @property
    def graph_variants(self) -> tuple[int, ...]:
        """Which captured graphs of a decode step it needs; empty (the default): its decode cannot be captured. A backend whose launches depend on more
        than the row count numbers the alternatives, ascending; each serves the steps of those before it too, with launches that do nothing."""
        return ()

    @property
    def graph_variant(self) -> int:
        """The member of ``graph_variants`` that the step prepared last must run with."""
        return 0

    @property
    def captures_extend(self) -> bool:
        """Whether a captured graph may hold extend rows too: their number and that of their tokens stay, how many tokens each row has does not."""
        return False

    def init_capture_metadata(self, batch: ForwardBatch, variant: int) -> None:  # noqa: ARG002
        """Prepare to capture a decode step of ``variant``; like ``init_forward_metadata``, but what the launches read must live in persistent buffers."""
        self.init_forward_metadata(batch)

    def init_replay_metadata(self, batch: ForwardBatch) -> None:
        """Refresh the persistent buffers before a captured graph is replayed. Rows that fill the graph up have one token."""
        self.init_forward_metadata(batch)

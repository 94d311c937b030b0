"""Attention layers: one kernel splits, rotates and stores; then a backend reads the pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import nn

from tokenspeed.errors import ModelError
from tokenspeed.interfaces.attention import AttentionBackend, AttentionLayer, LayerKV
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.interfaces.model import WeightSlot
from tokenspeed.layers.dtypes import short_name
from tokenspeed.layers.module import Layer
from tokenspeed.layers.quantization import SelectKernel
from tokenspeed.types import CacheGroup, KVLayout

__all__ = ["Attention", "KVSource", "PagedLayer", "bind_kv"]


class KVSource(Protocol):
    """What attention layers need of the KV pool."""

    @property
    def groups(self) -> Sequence[CacheGroup]:
        """The model's cache groups."""

    @property
    def layout(self) -> KVLayout:
        """Order of the axes of every page."""

    def layer(self, index: int) -> LayerKV:
        """Pages of one layer."""

    def wait_layer(self, index: int) -> None:
        """Return when the layer's pages may be read and written."""

    def layer_written(self, index: int) -> None:
        """The step's keys and values of this layer are in place."""


class PagedLayer(Layer):
    """Base of layers whose backend reads pages. Holds no cache: ``bind`` gives it pages and backends once the pool exists.

    Attributes:
        layer: what backends are told of it.
        q_heads: query heads of this rank; ``kv_heads`` and ``head_dim`` are its cache group's.
        kv, backends: its pages and its (extend, decode) backends, once bound.
    """

    def __init__(self, layer: AttentionLayer, *, q_heads: int, kv_heads: int, head_dim: int, layout: KVLayout) -> None:
        super().__init__()
        self.layer, self.layer_index = layer, layer.index
        self.q_heads, self.kv_heads, self.head_dim = q_heads, kv_heads, head_dim
        self.layout = layout
        self._layout_name = layout.value
        self.kv: LayerKV | None = None
        self.backends: tuple[AttentionBackend, AttentionBackend] | None = None

    def bind(self, source: KVSource, group_index: int, extend: AttentionBackend, decode: AttentionBackend) -> None:
        """Attach the pages of this layer and the backends of both phases."""
        if source.layout is not self.layout:
            raise ModelError(
                f"layer {self.layer_index} was built for {self.layout.value} pages, the pool has {source.layout.value}"
            )
        self.kv = kv = source.layer(self.layer_index)
        self.backends = (extend, decode)
        self._group_index = group_index
        self._k, self._v = kv.k, kv.v
        self._wait, self._written = source.wait_layer, source.layer_written


class Attention(PagedLayer):
    """``forward(qkv (T, (q_heads + 2 kv_heads) * head_dim), batch) -> (T, q_heads * head_dim)``."""

    def __init__(
        self,
        prefix: str,
        layer_index: int,
        *,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        cos_sin: torch.Tensor,
        interleaved: bool,
        window: int,
        softcap: float,
        qk_norm_eps: float | None,
        layout: KVLayout,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        select: SelectKernel,
        memory: AbstractContextManager[None],
    ) -> None:
        super().__init__(
            AttentionLayer(index=layer_index, scale=scale, window=window, softcap=softcap),
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layout=layout,
        )
        self._prefix = prefix
        self._cos_sin, self._interleaved, self._eps = cos_sin, interleaved, qk_norm_eps or 1e-6
        self._norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if qk_norm_eps is not None:
            with memory:
                self.q_norm = nn.Parameter(torch.ones(head_dim, dtype=dtype, device=device), requires_grad=False)
                self.k_norm = nn.Parameter(torch.ones(head_dim, dtype=dtype, device=device), requires_grad=False)
            self._norms = (self.q_norm.data, self.k_norm.data)
        self._write = select(
            KernelRequest(
                family="rope",
                mode="qkv_rope_write",
                dtype=short_name(dtype),
                layout=layout.value,
                features=frozenset() if kv_dtype == dtype else frozenset({f"kv_{short_name(kv_dtype)}"}),
                shape={"head_dim": head_dim, "rotary_dim": cos_sin.shape[1], "q_heads": q_heads, "kv_heads": kv_heads},
            )
        )

    def bind(self, source: KVSource, group_index: int, extend: AttentionBackend, decode: AttentionBackend) -> None:
        """Attach the pages of this layer and the backends of both phases."""
        super().bind(source, group_index, extend, decode)
        self._extend, self._decode = extend.forward_extend, decode.forward_decode
        self._extend_captured = decode.forward_extend

    def forward(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        layer = self.layer
        kv = self.kv
        assert kv is not None, "bind_kv comes before the first forward"
        self._wait(layer.index)
        q_norm, k_norm = self._norms
        q: torch.Tensor = self._write(
            qkv,
            batch.positions,
            self._cos_sin,
            self.q_heads,
            self.kv_heads,
            self.head_dim,
            self._k,
            self._v,
            batch.slot_mapping[self._group_index],
            self._layout_name,
            q_norm,
            k_norm,
            self._eps,
            self._interleaved,
        )
        self._written(layer.index)
        cut = batch.num_extend_tokens
        extend = self._extend_captured if batch.captured else self._extend
        if cut == 0:
            out = self._decode(q, kv, layer, batch)
        elif cut == batch.num_tokens:
            out = extend(q, kv, layer, batch)
        else:
            out = torch.cat((extend(q[:cut], kv, layer, batch), self._decode(q[cut:], kv, layer, batch)))
        return out.view(out.shape[0], -1)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Scales of the per-head norms, where the model has them."""
        for name, scale in zip(("q_norm", "k_norm"), self._norms, strict=True):
            if scale is not None:
                yield WeightSlot(
                    name=f"{self._prefix}.{name}.weight",
                    parameter=name,
                    shape=(self.head_dim,),
                    load=partial(_copy, scale),
                    ones=True,
                )


def _copy(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor)


def bind_kv(
    model: nn.Module,
    source: KVSource,
    backends: Sequence[tuple[AttentionBackend, AttentionBackend]]
    | Mapping[int, tuple[AttentionBackend, AttentionBackend]],
) -> None:
    """Give every attention layer of ``model`` its pages and its (extend, decode) backends; ``backends`` has one pair for each cache group with attention
    layers, by its number.

    Raises:
        ModelError: a layer is in no cache group, or its heads differ from its group's.
        PluginError: a backend has no kernel for a layer, or does not read the pool.
    """
    served: dict[int, tuple[AttentionBackend, list[AttentionLayer], list[LayerKV]]] = {}
    group_of = {layer: (index, group) for index, group in enumerate(source.groups) for layer in group.layers}
    for module in model.modules():
        if isinstance(module, PagedLayer):
            found = group_of.get(module.layer_index)
            if found is None:
                raise ModelError(
                    f"{type(model).__name__} declares no cache group for attention layer {module.layer_index}"
                )
            index, group = found
            if (group.kv_heads, group.head_dim) != (module.kv_heads, module.head_dim):
                raise ModelError(
                    f"layer {module.layer_index} has {module.kv_heads} KV heads of {module.head_dim}, its cache group {group.kv_heads} of {group.head_dim}"
                )
            extend, decode = backends[index]
            module.bind(source, index, extend, decode)
            for backend in {id(extend): extend, id(decode): decode}.values():
                _, layers, pages = served.setdefault(id(backend), (backend, [], []))
                layers.append(module.layer)
                pages.append(source.layer(module.layer_index))
    for backend, layers, pages in served.values():
        backend.bind_layers(layers)
        backend.bind_pages(pages)

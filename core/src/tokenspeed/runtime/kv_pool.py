"""The paged KV cache of one rank: a tensor pair per layer, sized from a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np
import torch

from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.attention import LayerKV
from tokenspeed.types import CacheGroup, KVLayout

__all__ = ["KVPool", "pages_in_budget", "pages_in_tokens", "storage_bytes"]


def pages_in_tokens(max_total_tokens: int, page_size: int) -> int:
    """Pages of a pool that holds ``max_total_tokens`` tokens (rounded up to whole pages).

    Raises:
        ConfigError: the count is not positive.
    """
    if max_total_tokens < 1:
        raise ConfigError(
            f"--max-total-tokens {max_total_tokens}: the KV pool needs at least one token; leave the flag out to size it from memory"
        )
    return -(-max_total_tokens // page_size)


def pages_in_budget(groups: Sequence[CacheGroup], page_size: int, element_bytes: int, budget_bytes: int) -> int:
    """Pages that fit in ``budget_bytes``; every group gets the same number.

    Raises:
        ConfigError: not even one page fits.
    """
    page_bytes = page_size * sum(group.bytes_per_token(element_bytes) for group in groups)
    pages = budget_bytes // page_bytes
    if pages < 1:
        raise ConfigError(
            f"the KV budget of {budget_bytes} bytes holds no page of {page_bytes} bytes; raise --kv-cache-memory-bytes or --gpu-memory-utilization"
        )
    return pages


class KVPool:
    """Keys and values of every layer on this rank.

    Memory is reserved at once but touched only when a page is first written (host devices), and starts as zeros: a masked read of a page that was
    never written yields no NaN.

    Args:
        groups: the model's cache groups; group i has ``num_pages[i]`` pages of ``page_sizes[i]`` tokens.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        layout: KVLayout,
        page_sizes: Sequence[int],
        num_pages: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.groups = tuple(groups)
        self.layout = layout
        self.page_sizes = tuple(page_sizes)
        self.num_pages = tuple(num_pages)
        self._layers: dict[int, LayerKV] = {}
        self._wait_layer: Callable[[int], None] | None = None
        for group, page_size, pages in zip(self.groups, self.page_sizes, self.num_pages, strict=True):
            for index in group.layers:
                k = _zeros(_shape(layout, pages, page_size, group.kv_heads, group.head_dim), dtype, device)
                if group.kind == "mla":
                    v = k[..., : group.v_head_dim]
                else:
                    v = _zeros(_shape(layout, pages, page_size, group.kv_heads, group.v_head_dim), dtype, device)
                self._layers[index] = LayerKV(k=k, v=v)

    def layer(self, index: int) -> LayerKV:
        """Pages of model layer ``index``."""
        return self._layers[index]

    @property
    def layers(self) -> dict[int, LayerKV]:
        """Pages by layer index."""
        return dict(self._layers)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the pool."""
        return [tensor for index in range(len(self.groups)) for _, own in self.page_tensors(index) for tensor in own]

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def page_tensors(self, group: int) -> list[tuple[int, tuple[torch.Tensor, ...]]]:
        """(layer, tensors) of each layer of a group, in order; the first axis of every tensor is its pages. Values that are a part of the keys are not told of
        again."""
        latent = self.groups[group].kind == "mla"
        kvs = [(layer, self._layers[layer]) for layer in self.groups[group].layers]
        return [(layer, (kv.k,) if latent else (kv.k, kv.v)) for layer, kv in kvs]

    def use_transfers(self, wait_layer: Callable[[int], None]) -> None:
        """From now on ``wait_layer(layer)`` is called before each layer reads its pages."""
        self._wait_layer = wait_layer

    def wait_layer(self, index: int) -> None:
        """Called before layer ``index`` reads its pages; a transfer that fills them layer by layer waits here."""
        if self._wait_layer is not None:
            self._wait_layer(index)

    def layer_written(self, index: int) -> None:
        """Called after layer ``index`` wrote its pages; a transfer that drains them layer by layer starts here."""


def _shape(layout: KVLayout, pages: int, page_size: int, heads: int, head_dim: int) -> tuple[int, int, int, int]:
    return (pages, page_size, heads, head_dim) if layout is KVLayout.NHD else (pages, heads, page_size, head_dim)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros come from calloc: the system hands out zero pages on first touch, where torch.zeros would write them all now.
    raw = torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8))
    return raw.view(dtype).view(shape)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storage behind ``tensors``; what several share (tied weights, views) counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

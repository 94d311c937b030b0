"""The paged KV cache of one rank: a tensor pair per layer, sized from a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.attention import LayerKV
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.layers.dtypes import dtype_from_name, short_name
from tokenspeed.layers.quantization import SelectKernel
from tokenspeed.runtime.transfer import upload
from tokenspeed.types import CacheGroup, KVLayout

__all__ = [
    "KVPool",
    "further_pages",
    "layer_bytes",
    "named_groups",
    "pages_in_budget",
    "pages_in_tokens",
    "storage_bytes",
    "unpaid_pages",
]

Int32 = npt.NDArray[np.int32]

#: Pages of a group, where memory sets no bound.
_MOST_UNPAID = 1 << 20


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


def further_pages(
    groups: Sequence[CacheGroup],
    page_size: int,
    element_bytes: int,
    *,
    rows: int,
    max_model_len: int,
    prompt_tokens: int = 0,
    budget_bytes: int | None = None,
) -> list[int]:
    """Pages of the window groups and states of the recurrent ones, in their order; 0 for full groups.

    What ``rows`` requests use at once, and as much again to keep for others (states: three times as many, one for each turn's end and its forks); and
    what the ``prompt_tokens`` of all steps at once lie on. Of a budget they take half at most, in these proportions, but never less than one request needs;
    all of it, for more to keep, where full groups cost nothing.
    """
    # A step in flight keeps its window while the next is planned; and a prompt holds what its steps read and write, whatever its window.
    longest = -(-max_model_len // page_size) + 1
    chunks = -(-prompt_tokens // page_size)
    want, least, each = [], [], []
    for group in groups:
        window = min((group.window + page_size - 1) // page_size + 1, longest) if group.kind == "window" else 0
        states = 1 if group.kind == "recurrent" else 0
        want.append(min(2 * rows * window + chunks, 2 * rows * longest) if window else 4 * rows * states)
        least.append(max((group.window + page_size - 1) // page_size + 1, 1) if window else 2 * states)
        each.append(
            group.bytes_per_state(element_bytes) if states else page_size * group.bytes_per_token(element_bytes)
        )
    total = sum(map(int.__mul__, want, each))
    if budget_bytes is None or total == 0:
        share = 1.0
    elif any(group.keeps_all and group.bytes_per_token(element_bytes) for group in groups):
        share = min(1.0, budget_bytes / 2 / total)
    else:
        share = min(budget_bytes / total, _MOST_UNPAID / max(want))
    return [max(low, int(share * pages)) for pages, low in zip(want, least, strict=True)]


def unpaid_pages(page_size: int, *, rows: int, max_model_len: int) -> int:
    """Pages of full groups without layers, which cost no device memory but a little of the scheduler's: what ``rows`` requests use, and as many to keep."""
    longest = -(-max_model_len // page_size)
    return max(longest, min(2 * rows * longest, _MOST_UNPAID))


def named_groups(groups: Sequence[CacheGroup], index: int) -> list[CacheGroup]:
    """The groups that a page of group ``index`` belongs to: all full ones under the first of them, none under the others, itself for a window or states."""
    if not groups[index].keeps_all:
        return [groups[index]]
    return [group for group in groups if group.keeps_all] if index == 0 else []


def layer_bytes(group: CacheGroup, page_size: int, element_bytes: int) -> list[int]:
    """Bytes of one page, or one state, in each tensor of a layer of ``group``."""
    if group.kind == "recurrent":
        sizes = [dtype_from_name(name).itemsize for name in group.state_dtypes] or [element_bytes] * len(group.states)
        return [prod(shape) * size for shape, size in zip(group.states, sizes, strict=True)]
    dims = [group.head_dim] if group.kind == "mla" else [group.head_dim, group.v_head_dim]
    return [page_size * group.kv_heads * dim * element_bytes for dim in dims]


class KVPool:
    """Keys and values, or states, of every layer on this rank. States are of the type that their group names, or else of ``dtype``.

    Memory is reserved at once but touched only when a page is first written (host devices), and starts as zeros: a masked read of a page that was
    never written yields no NaN.

    Args:
        groups: the model's cache groups; group i has ``num_pages[i]`` pages of ``page_sizes[i]`` tokens, or as many states.
        select_kernel: ``KernelRegistry.select``, asked once for ``recurrent.copy`` and ``recurrent.zero`` of each type that states have; never without
            recurrent groups.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        select_kernel: SelectKernel,
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
        self._states: dict[int, tuple[torch.Tensor, ...]] = {}
        self._wait_layer: Callable[[int], None] | None = None
        for group, page_size, pages in zip(self.groups, self.page_sizes, self.num_pages, strict=True):
            for index in group.layers:
                if group.kind == "recurrent":
                    # One more than the scheduler knows of: rows that only fill a captured step up have it.
                    self._states[index] = tuple(
                        _zeros((pages + 1, *shape), each, device)
                        for shape, each in zip(group.states, _state_dtypes(group, dtype), strict=True)
                    )
                    continue
                k = _zeros(_shape(layout, pages, page_size, group.kv_heads, group.head_dim), dtype, device)
                if group.kind == "mla":
                    v = k[..., : group.v_head_dim]
                else:
                    v = _zeros(_shape(layout, pages, page_size, group.kv_heads, group.v_head_dim), dtype, device)
                self._layers[index] = LayerKV(k=k, v=v)
        self._device = device
        types = dict.fromkeys(tensor.dtype for tensors in self._states.values() for tensor in tensors)
        self._copy, self._zero = (
            {
                each: select_kernel(KernelRequest(family="recurrent", mode=mode, dtype=short_name(each)))
                for each in types
            }
            for mode in ("copy", "zero")
        )

    def layer(self, index: int) -> LayerKV:
        """Pages of model layer ``index``."""
        return self._layers[index]

    def states(self, index: int) -> tuple[torch.Tensor, ...]:
        """States of recurrent model layer ``index``: each tensor is (states + 1, ...), the last one of which belongs to no request."""
        return self._states[index]

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
        """(layer, tensors) of what a page of ``group`` names, in the order of layers; the first axis of every tensor is the pages or states.

        Full groups move in lockstep under one page id: group 0 tells of the layers of all of them, the others of none. Values that are a part of the keys are
        not told of again.
        """
        found = []
        for each in named_groups(self.groups, group):
            for layer in each.layers:
                if each.kind == "recurrent":
                    tensors = self._states[layer]
                else:
                    kv = self._layers[layer]
                    tensors = (kv.k,) if each.kind == "mla" else (kv.k, kv.v)
                found.append((layer, tensors))
        return sorted(found, key=lambda each: each[0])

    def prepare_states(self, kinds: Int32, groups: Int32, sources: Int32, targets: Int32) -> None:
        """Before a step: state ``targets[i]`` of ``groups[i]`` becomes zero (kind 0) or a copy of state ``sources[i]`` (kind 1); nothing happens to
        what is -1. No state is both source and target."""
        for number in np.unique(groups):
            tensors = [tensor for layer in self.groups[number].layers for tensor in self._states[layer]]
            for kind in (0, 1):
                chosen = (groups == number) & (kinds == kind)
                if not chosen.any():
                    continue
                source, target = upload(
                    [sources[chosen].astype(np.int64), targets[chosen].astype(np.int64)], self._device
                )
                for tensor in tensors:
                    if kind:
                        self._copy[tensor.dtype](tensor, source, target)
                    else:
                        self._zero[tensor.dtype](tensor, target)

    def use_transfers(self, wait_layer: Callable[[int], None]) -> None:
        """From now on ``wait_layer(layer)`` is called before each layer reads its pages."""
        self._wait_layer = wait_layer

    def wait_layer(self, index: int) -> None:
        """Called before layer ``index`` reads its pages; a transfer that fills them layer by layer waits here."""
        if self._wait_layer is not None:
            self._wait_layer(index)

    def layer_written(self, index: int) -> None:
        """Called after layer ``index`` wrote its pages; a transfer that drains them layer by layer starts here."""


def _state_dtypes(group: CacheGroup, dtype: torch.dtype) -> list[torch.dtype]:
    return [dtype_from_name(name) for name in group.state_dtypes] or [dtype] * len(group.states)


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

"""The backend and its kernels pass core's suites, with and without faster kernels installed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenspeed_plugin_attention_sdpa.backend import SdpaAttention
from tokenspeed_plugin_attention_sdpa.plugin import tokenspeed_attention_backends, tokenspeed_kernels

from tokenspeed.errors import PluginError
from tokenspeed.interfaces.attention import AttentionLayer, LayerKV
from tokenspeed.plugins import KernelSpec, Priority
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.plugins.registry import Contribution
from tokenspeed.testing.attention import AttentionBackendSuite
from tokenspeed.testing.harness import attention_context, kernel_registry
from tokenspeed.testing.kernel import KernelSuite
from tokenspeed.testing.paged import PagedCache, Session
from tokenspeed.types import CacheGroup

DECODE, EXTEND = tokenspeed_kernels()


class TestDecodeKernel(KernelSuite):
    spec = DECODE


class TestExtendKernel(KernelSuite):
    spec = EXTEND


class TestBackendOnItsOwnKernels(AttentionBackendSuite):
    spec = tokenspeed_attention_backends()[0]
    kernels = (DECODE, EXTEND)


class TestBackendOnReferenceKernels(AttentionBackendSuite):
    """Every option may be overridden to the reference."""

    spec = tokenspeed_attention_backends()[0]
    heads = ((6, 2),)


class Recorder:
    """A decode kernel that remembers what it was given."""

    def __init__(self) -> None:
        self.intervals: list[object] = []

    def __call__(self, q: torch.Tensor, *arguments: object) -> torch.Tensor:
        self.intervals.append(arguments[-1])
        return q


RECORDER = Recorder()


@pytest.fixture
def step() -> tuple[CacheGroup, PagedCache]:
    RECORDER.intervals.clear()
    group = CacheGroup(kind="full", layers=(0,), kv_heads=1, head_dim=8, v_head_dim=8)
    return group, PagedCache([group])


def decode_once(group: CacheGroup, cache: PagedCache, *kernels: KernelSpec) -> None:
    backend = SdpaAttention(attention_context(group, 1, kernels=kernel_registry(*kernels)))
    rows = [Session() for _ in range(2)]
    cache.batch(extend=[(row, [0] * 4) for row in rows])
    batch = cache.batch(
        extend=[(Session(), [0] * 3)], decode=[(row, [0]) for row in rows], prefix_intervals=[(1, 3, 0, 1)]
    )
    backend.init_forward_metadata(batch)
    for kv in cache.state.values():
        kv.k.zero_()
        kv.v.zero_()
    backend.forward_decode(torch.zeros(2, 1, 8), cache.layer(0), AttentionLayer(index=0, scale=1.0), batch)


def recorder_spec(features: frozenset[str], priority: Priority = Priority.PERFORMANT) -> KernelSpec:
    target = f"{__name__}:RECORDER"
    return KernelSpec(
        name="recorder", target=target, family="attention", mode="decode", features=features, priority=priority
    )


def test_a_kernel_that_shares_prefixes_gets_the_intervals_counted_from_the_first_decode_row(
    step: tuple[CacheGroup, PagedCache],
) -> None:
    decode_once(*step, recorder_spec(frozenset({"shared_prefix"})))
    (intervals,) = RECORDER.intervals
    assert isinstance(intervals, np.ndarray)
    assert intervals.tolist() == [[0, 2, 0, 1]]


def test_a_kernel_that_does_not_share_gets_no_intervals(step: tuple[CacheGroup, PagedCache]) -> None:
    decode_once(*step, recorder_spec(frozenset()))
    assert RECORDER.intervals == [None]


def test_a_slower_kernel_does_not_win_because_it_can_share(step: tuple[CacheGroup, PagedCache]) -> None:
    decode_once(*step, recorder_spec(frozenset({"shared_prefix"}), Priority.REFERENCE), DECODE)
    assert RECORDER.intervals == []


def test_a_cache_of_another_type_is_refused_at_construction_by_kernels_that_cannot_read_it() -> None:
    group = CacheGroup(kind="full", layers=(0,), kv_heads=1, head_dim=8, v_head_dim=8)
    registry = kernel_registry(DECODE, EXTEND)
    context = attention_context(group, 1, kv_dtype=torch.float64, kernels=registry)
    with pytest.raises(PluginError, match="lacks kv_"):
        SdpaAttention(context)


def test_a_layer_that_no_kernel_serves_is_refused_when_it_is_bound() -> None:
    """E7: not in the first request's step, which would end the engine."""
    group = CacheGroup(kind="full", layers=(0, 1), kv_heads=1, head_dim=8, v_head_dim=8)
    specs = [replace(spec, features=frozenset()) for spec in (DECODE, EXTEND)]
    registry = KernelRegistry([Contribution("ours", spec) for spec in specs], platform_name="cpu")
    backend = SdpaAttention(attention_context(group, 1, kernels=registry))
    backend.bind_layers([AttentionLayer(index=0, scale=1.0)])
    with pytest.raises(PluginError, match="lacks window"):
        backend.bind_layers([AttentionLayer(index=0, scale=1.0), AttentionLayer(index=1, scale=1.0, window=4)])


def test_what_others_left_in_a_page_does_not_reach_a_row() -> None:
    """A request that ended in NaN leaves it in its pages; the next owner of a page reads only what it wrote."""
    from tokenspeed_plugin_attention_sdpa.kernels import decode

    k, v = torch.full((1, 4, 1, 8), float("nan")), torch.full((1, 4, 1, 8), float("nan"))
    k[0, :2], v[0, :2] = 1.0, 2.0
    kv = LayerKV(k=k, v=v)
    table = torch.zeros(1, 1, dtype=torch.int32)
    out = decode(torch.ones(1, 1, 8), kv.k, kv.v, table, torch.tensor([2], dtype=torch.int32), 1, 1.0, "NHD")
    assert out.flatten().tolist() == [2.0] * 8

"""The KV pool has the layout that backends expect, is sized from what the user gave, and starts clean."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.errors import ConfigError
from tokenspeed.runtime.kv_pool import KVPool, pages_in_budget, pages_in_tokens, storage_bytes
from tokenspeed.types import CacheGroup, KVLayout

GROUP = CacheGroup(kind="full", layers=(0, 1), kv_heads=3, head_dim=8, v_head_dim=6)


@pytest.mark.parametrize(
    ("layout", "k", "v"), [(KVLayout.NHD, (5, 4, 3, 8), (5, 4, 3, 6)), (KVLayout.HND, (5, 3, 4, 8), (5, 3, 4, 6))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_have_the_layout_and_start_as_zeros(layout, k, v, dtype):
    pool = KVPool([GROUP], layout=layout, page_sizes=[4], num_pages=[5], dtype=dtype, device=torch.device("cpu"))
    assert pool.layer(1).k.shape == k
    assert pool.layer(1).v.shape == v
    assert all(not t.any() and t.dtype is dtype for t in pool.tensors)
    assert pool.nbytes == 5 * 4 * GROUP.bytes_per_token(dtype.itemsize)


def test_sizes_follow_the_flags():
    assert pages_in_tokens(33, 16) == 3
    page = 16 * GROUP.bytes_per_token(4)
    assert pages_in_budget([GROUP, GROUP], 16, 4, 10 * page) == 5


def test_a_pool_without_a_page_is_refused_naming_the_flag():
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        pages_in_budget([GROUP], 16, 4, 100)
    with pytest.raises(ConfigError, match="--max-total-tokens"):
        pages_in_tokens(0, 16)


def test_shared_storage_is_counted_once():
    weight = torch.zeros(10, 4)
    assert storage_bytes([weight, weight.view(4, 10), torch.zeros(2)]) == 160 + 8


@pytest.mark.parametrize("layout", [KVLayout.NHD, KVLayout.HND])
def test_latents_hold_their_values_once(layout):
    group = CacheGroup(kind="mla", layers=(0, 1), kv_heads=1, head_dim=12, v_head_dim=8)
    assert group.bytes_per_token(2) == 2 * 12 * 2
    pool = KVPool(
        [group], layout=layout, page_sizes=[4], num_pages=[3], dtype=torch.float32, device=torch.device("cpu")
    )
    kv = pool.layer(1)
    kv.k.fill_(7.0)
    assert kv.v.shape[-1] == 8
    assert bool((kv.v == 7.0).all())
    assert pool.nbytes == 3 * 4 * group.bytes_per_token(4)
    assert [len(tensors) for _, tensors in pool.page_tensors(0)] == [1, 1]

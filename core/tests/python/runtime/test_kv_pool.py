"""The KV pool has the layout that backends expect, is sized from what the user gave, and starts clean."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.builtin.kernels import recurrent
from tokenspeed.builtin.kernels.catalog import REFERENCE_KERNELS
from tokenspeed.errors import ConfigError, UnusableChoiceError
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.layers.quantization import SelectKernel
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.plugins.registry import Contribution
from tokenspeed.plugins.specs import KernelSpec
from tokenspeed.runtime.kv_pool import (
    KVPool,
    further_pages,
    pages_in_budget,
    pages_in_tokens,
    storage_bytes,
    unpaid_pages,
)
from tokenspeed.testing.harness import kernel_registry
from tokenspeed.types import CacheGroup, KVLayout

GROUP = CacheGroup(kind="full", layers=(0, 1), kv_heads=3, head_dim=8, v_head_dim=6)


def make_pool(
    groups: Sequence[CacheGroup],
    *,
    pages: Sequence[int],
    layout: KVLayout = KVLayout.NHD,
    dtype: torch.dtype = torch.float32,
    select: SelectKernel | None = None,
) -> KVPool:
    return KVPool(
        groups,
        select_kernel=select or kernel_registry().select,
        layout=layout,
        page_sizes=[0 if group.kind == "recurrent" else 4 for group in groups],
        num_pages=pages,
        dtype=dtype,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("layout", "k", "v"), [(KVLayout.NHD, (5, 4, 3, 8), (5, 4, 3, 6)), (KVLayout.HND, (5, 3, 4, 8), (5, 3, 4, 6))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_have_the_layout_and_start_as_zeros(layout, k, v, dtype):
    pool = make_pool([GROUP], layout=layout, pages=[5], dtype=dtype)
    assert pool.layer(1).k.shape == k
    assert pool.layer(1).v.shape == v
    assert all(not t.any() and t.dtype is dtype for t in pool.tensors)
    assert pool.nbytes == 5 * 4 * GROUP.bytes_per_token(dtype.itemsize)


def test_sizes_follow_the_flags():
    assert pages_in_tokens(33, 16) == 3
    page = 16 * GROUP.bytes_per_token(4)
    assert pages_in_budget([GROUP, GROUP], 16, 4, 10 * page) == 5


WINDOW = CacheGroup(kind="window", layers=(2,), kv_heads=3, head_dim=8, v_head_dim=6, window=32)
STATES = CacheGroup(kind="recurrent", layers=(3, 4), states=((5, 7), (2,)), interval=64)


def test_windows_and_states_get_what_all_rows_use_and_some_to_keep():
    pages = further_pages([GROUP, WINDOW, STATES], 16, 4, rows=10, max_model_len=1000)
    assert pages == [0, 2 * 10 * 3, 4 * 10]  # 32 tokens and one ahead lie on three pages at most
    assert further_pages([GROUP, WINDOW], 16, 4, rows=10, max_model_len=16) == [0, 2 * 10 * 2]  # no request is so long


def test_a_window_group_has_pages_for_the_prompts_of_all_steps_beside_the_windows():
    pages = further_pages([GROUP, WINDOW, STATES], 16, 4, rows=1, max_model_len=100_000, prompt_tokens=2 * 8192)
    assert pages == [0, 2 * 3 + 2 * 8192 // 16, 4]
    assert further_pages([GROUP, WINDOW], 16, 4, rows=1, max_model_len=96, prompt_tokens=2 * 8192) == [0, 2 * 7]


def test_windows_and_states_take_half_of_a_small_budget_and_never_less_than_a_request_needs():
    groups = [GROUP, WINDOW, STATES]
    full = further_pages(groups, 16, 4, rows=10, max_model_len=1000)
    each = [0, 16 * WINDOW.bytes_per_token(4), STATES.bytes_per_state(4)]
    want = sum(map(int.__mul__, full, each))
    assert further_pages(groups, 16, 4, rows=10, max_model_len=1000, budget_bytes=2 * want) == full
    half = further_pages(groups, 16, 4, rows=10, max_model_len=1000, budget_bytes=want)
    assert half == [0, 30, 20]
    assert further_pages(groups, 16, 4, rows=10, max_model_len=1000, budget_bytes=1) == [0, 3, 2]


def test_states_start_as_zeros_and_are_zeroed_and_copied_in_every_layer():
    pool = make_pool([GROUP, STATES], pages=[5, 3])
    assert [tuple(t.shape) for t in pool.states(4)] == [(4, 5, 7), (4, 2)]  # the last one is of no request
    assert pool.nbytes == 5 * 4 * GROUP.bytes_per_token(4) + 4 * STATES.bytes_per_state(4)
    for layer in (3, 4):
        for tensor in pool.states(layer):
            tensor[0], tensor[1] = layer, 9
    kinds, groups, sources, targets = (np.array(a, dtype=np.int32) for a in ([1, 0], [1, 1], [0, -1], [2, 1]))
    pool.prepare_states(kinds, groups, sources, targets)
    for layer in (3, 4):
        for tensor in pool.states(layer):
            assert tensor[0].eq(layer).all()
            assert tensor[2].eq(layer).all()
            assert not tensor[1].any()


def test_states_may_be_of_other_types_than_the_cache():
    group = replace(STATES, state_dtypes=("float32", "bfloat16"))
    assert group.bytes_per_state(1) == 2 * (35 * 4 + 2 * 2)
    pool = make_pool([GROUP, group], pages=[5, 3], dtype=torch.float16)
    assert [tensor.dtype for tensor in pool.states(3)] == [torch.float32, torch.bfloat16]
    assert pool.nbytes == 5 * 4 * GROUP.bytes_per_token(2) + 4 * group.bytes_per_state(2)


DTYPES = ("fp32", "bf16", "fp16")
#: Beside full groups and a window; states of several tensors and types, one of them a single number.
MIXED = (
    GROUP,
    WINDOW,
    replace(STATES, states=((5, 7), (2,), ()), state_dtypes=("float32", "bfloat16", "float16")),
    replace(STATES, layers=(5,), states=((3, 2),)),
)
#: (kind, group, source, target): both groups and kinds in turns, and numbers that are none.
MOVES = ((1, 2, 0, 4), (0, 3, -1, 1), (0, 2, -1, 1), (1, 3, 3, 0), (1, 2, 3, 2), (0, 2, -1, -1), (1, 3, -1, 2), (1, 2, 1, -1))  # fmt: skip


def filled(select: SelectKernel | None = None) -> KVPool:
    pool = make_pool(MIXED, pages=[5, 4, 6, 5], select=select)
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())))
    return pool


def move(pool: KVPool) -> None:
    pool.prepare_states(*(np.array(column, dtype=np.int32) for column in zip(*MOVES, strict=True)))


def test_a_plan_moves_the_states_that_it_names_and_leaves_pages_and_other_states_alone() -> None:
    pool = filled()
    expected = [[tensor.clone() for tensor in tensors] for group in range(4) for _, tensors in pool.page_tensors(group)]
    of_group = [group for group in range(4) for _ in pool.page_tensors(group)]
    for kind, group, source, target in MOVES:
        if target < 0 or (kind and source < 0):
            continue
        for tensor in (tensor for at, own in zip(of_group, expected, strict=True) if at == group for tensor in own):
            tensor[target] = tensor[source].clone() if kind else 0
    move(pool)
    found = [tensors for group in range(4) for _, tensors in pool.page_tensors(group)]
    for own, others in zip(found, expected, strict=True):
        for tensor, other in zip(own, others, strict=True):
            assert torch.equal(tensor, other)


@pytest.fixture
def overridden(monkeypatch: pytest.MonkeyPatch) -> tuple[KernelRegistry, list[tuple[str, torch.dtype, list[int]]]]:
    """A registry in which the user named kernels of a plugin for states, and what they were called with: mode, type, targets."""
    calls: list[tuple[str, torch.dtype, list[int]]] = []

    def copy(states: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        calls.append(("copy", states.dtype, target.tolist()))
        recurrent.copy(states, source, target)

    def zero(states: torch.Tensor, target: torch.Tensor) -> None:
        calls.append(("zero", states.dtype, target.tolist()))
        recurrent.zero(states, target)

    module = types.ModuleType("kernels_that_record")
    module.copy, module.zero = copy, zero  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels_that_record", module)
    specs = [
        KernelSpec(name="fake", family="recurrent", mode=mode, target=f"kernels_that_record:{mode}", dtypes=DTYPES)
        for mode in ("copy", "zero")
    ]
    contributions = [Contribution("builtin", spec) for spec in REFERENCE_KERNELS]
    contributions += [Contribution("recorder", spec) for spec in specs]
    overrides = {"recurrent.copy": "fake", "recurrent.zero": "fake"}
    return KernelRegistry(contributions, platform_name="cpu", overrides=overrides), calls


def test_states_are_moved_by_the_kernels_that_the_user_named(overridden: Any) -> None:
    registry, calls = overridden
    pool, reference = filled(registry.select), filled()
    move(pool)
    move(reference)
    assert all(torch.equal(one, other) for one, other in zip(pool.tensors, reference.tensors, strict=True))
    moved = {"zero": [[1, -1], [1]], "copy": [[4, 2, -1], [0, 2]]}  # of the first and the second group
    per_layer = [torch.float32, torch.bfloat16, torch.float16]
    expected = [(kind, dtype, moved[kind][0]) for kind in ("zero", "copy") for dtype in per_layer * 2]
    assert calls == expected + [(kind, torch.float32, moved[kind][1]) for kind in ("zero", "copy")]


def test_kernels_are_asked_for_when_the_pool_is_made_and_never_again() -> None:
    asked: list[tuple[str, str, str]] = []
    select = kernel_registry().select

    def asking(request: KernelRequest) -> Callable[..., Any]:
        asked.append((request.family, request.mode, request.dtype))
        return select(request)

    make_pool([GROUP, WINDOW], pages=[5, 4], select=asking)
    assert asked == [], "there are no states"
    pool = filled(asking)
    assert sorted(asked) == sorted(("recurrent", mode, dtype) for mode in ("copy", "zero") for dtype in DTYPES)
    asked.clear()
    move(pool)
    assert asked == []


def test_a_named_kernel_that_cannot_move_the_states_is_refused_when_the_pool_is_made() -> None:
    spec = KernelSpec(name="narrow", family="recurrent", mode="copy", target="nowhere:copy", dtypes=("bf16",))
    contributions = [Contribution("builtin", spec) for spec in REFERENCE_KERNELS] + [Contribution("theirs", spec)]
    registry = KernelRegistry(contributions, platform_name="cpu", overrides={"recurrent.copy": "narrow"})
    with pytest.raises(UnusableChoiceError, match=r"recurrent\.copy.*takes bf16, not fp(16|32)"):
        make_pool(
            [GROUP, STATES, replace(STATES, layers=(6,), state_dtypes=("float16",) * 2)],
            pages=[5, 3, 3],
            select=registry.select,
        )


def test_without_bytes_in_full_groups_the_others_have_the_budget():
    """As a model without full attention declares them."""
    groups = [CacheGroup(kind="full", layers=()), WINDOW, STATES]
    want = further_pages(groups, 16, 4, rows=10, max_model_len=1000)
    each = [0, 16 * WINDOW.bytes_per_token(4), STATES.bytes_per_state(4)]
    budget = 3 * sum(map(int.__mul__, want, each))
    assert further_pages(groups, 16, 4, rows=10, max_model_len=1000, budget_bytes=budget) == [0, 180, 120]
    huge = further_pages(groups, 16, 4, rows=10, max_model_len=1000, budget_bytes=1 << 60)
    assert max(huge) == 1 << 20
    assert unpaid_pages(16, rows=10, max_model_len=1000) == 2 * 10 * 63
    assert unpaid_pages(16, rows=1000, max_model_len=1 << 20) == 1 << 20
    assert unpaid_pages(1, rows=1, max_model_len=1 << 22) == 1 << 22, "one request fits in any case"


def test_full_groups_in_lockstep_are_told_of_once():
    groups = [GROUP, WINDOW, replace(GROUP, layers=(5,), kv_heads=1)]
    pool = make_pool(groups, pages=[5, 4, 5])
    assert [[layer for layer, _ in pool.page_tensors(index)] for index in range(3)] == [[0, 1, 5], [2], []]
    assert pool.nbytes == 4 * (
        5 * (GROUP.bytes_per_token(4) + groups[2].bytes_per_token(4)) + 4 * WINDOW.bytes_per_token(4)
    )


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
    pool = make_pool([group], layout=layout, pages=[3])
    kv = pool.layer(1)
    kv.k.fill_(7.0)
    assert kv.v.shape[-1] == 8
    assert bool((kv.v == 7.0).all())
    assert pool.nbytes == 3 * 4 * group.bytes_per_token(4)
    assert [len(tensors) for _, tensors in pool.page_tensors(0)] == [1, 1]

"""Copies of pages on an accelerator's own stream: right in every layer, and in order with what else the device does; and states moved before a step.

Needs the plugin kernels-triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenspeed_plugin_kernels_triton.plugin import tokenspeed_kernels

from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.runtime.host_pool import HostPool
from tokenspeed.runtime.kv_pool import KVPool
from tokenspeed.runtime.page_copies import PageMove
from tokenspeed.runtime.stream_copies import StreamCopies
from tokenspeed.testing.harness import kernel_registry
from tokenspeed.types import CacheGroup, KVLayout

pytestmark = pytest.mark.gpu

PAGES, HOST = 100, 120
LAYERS = 10
GROUPS = (
    CacheGroup(kind="full", layers=(*range(LAYERS - 1),), kv_heads=2, head_dim=64, v_head_dim=32),
    CacheGroup(kind="window", layers=(LAYERS - 1,), kv_heads=1, head_dim=128, v_head_dim=128, window=32),
)
#: Two full groups under one page id, and states of two types.
MIXED = (
    CacheGroup(kind="full", layers=(0, 2), kv_heads=2, head_dim=64, v_head_dim=32),
    CacheGroup(
        kind="recurrent",
        layers=(1, 3),
        states=((4, 64, 64), (192, 3)),
        state_dtypes=("float32", "bfloat16"),
        interval=64,
    ),
    CacheGroup(kind="full", layers=(4,), kv_heads=1, head_dim=64, v_head_dim=64),
)
#: Cycles that a kernel keeps the device busy: tens of milliseconds.
BUSY = 100_000_000


def make_pool(groups: tuple[CacheGroup, ...], kernels: KernelRegistry) -> KVPool:
    return KVPool(
        groups,
        select_kernel=kernels.select,
        layout=KVLayout.HND,
        page_sizes=[0 if group.kind == "recurrent" else 16 for group in groups],
        num_pages=[PAGES] * len(groups),
        dtype=torch.bfloat16,
        device=torch.device("cuda", torch.cuda.current_device()),
    )


def triton_kernels() -> KernelRegistry:
    """As an engine chooses on a GPU."""
    capability = torch.cuda.get_device_capability()
    return kernel_registry(*tokenspeed_kernels(), platform="cuda", capability=capability, device="cuda")


class Bench:
    def __init__(self, groups: tuple[CacheGroup, ...] = GROUPS) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.pool = make_pool(groups, triton_kernels())
        for tensor in self.pool.tensors:
            tensor.normal_()
        self.done: dict[int, int] = {}
        self.host = HostPool(self.pool, [HOST] * len(groups), pinned=True)
        self.copies = StreamCopies(self.host, self.done.__setitem__, device=self.device, layers=4, chunk=32)
        torch.cuda.synchronize()

    def moves(self, *entries: tuple[int, int, list[int], list[int]]) -> list[PageMove]:
        return [
            PageMove(
                number=number, group=group, device=np.array(device, dtype=np.int32), host=np.array(host, dtype=np.int32)
            )
            for number, group, device, host in entries
        ]


def busy() -> torch.cuda.Event:
    """Keep the device busy, as the step before does; an event behind that."""
    torch.cuda._sleep(BUSY)
    ended = torch.cuda.Event()
    ended.record()
    return ended


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.copies.close()


def test_pages_go_out_and_come_back_in_every_layer(bench: Bench) -> None:
    """More pages than staging holds, more layers than a slice, two groups, in no order."""
    before = [tensor.clone() for tensor in bench.pool.tensors]
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))[:70].tolist()
    host = torch.randperm(HOST, generator=torch.Generator().manual_seed(2))[:70].tolist()
    bench.copies.write_back(bench.moves((1, 0, pages, host), (2, 1, pages[:5], host[:5])))
    bench.copies.settle()
    for tensor in bench.pool.tensors:
        tensor.zero_()
    bench.copies.load_back(bench.moves((3, 0, pages, host), (4, 1, pages[:5], host[:5])))
    for layer in range(LAYERS):
        bench.copies.wait_layer(layer)
    torch.cuda.synchronize()
    bench.copies.poll()
    assert bench.done == {1: 70, 2: 5, 3: 70, 4: 5}
    moved = [pages] * 2 * (LAYERS - 1) + [pages[:5]] * 2
    for tensor, old, those in zip(bench.pool.tensors, before, moved, strict=True):
        others = sorted(set(range(PAGES)) - set(those))
        assert torch.equal(tensor[those], old[those])
        assert not tensor[others].any()


def test_a_state_that_comes_from_the_host_is_copied_when_it_has_come(bench: Bench) -> None:
    """Without the host waiting, and beside pages of full groups: a plan loads a state back and copies it before its step."""
    del bench
    mixed = Bench(MIXED)
    mixed.pool.prepare_states(
        *(np.array([value], dtype=np.int32) for value in (1, 1, 0, 1))
    )  # kernels load on first use
    mixed.copies.load_back(mixed.moves((0, 0, [0], [0]), (9, 1, [0], [0])))
    mixed.copies.settle()
    mixed.done.clear()
    before = [tensor.clone() for tensor in mixed.pool.tensors]
    mixed.copies.write_back(mixed.moves((1, 0, [7, 8], [0, 1]), (2, 1, [5], [9])))
    mixed.copies.settle()
    for tensor in mixed.pool.tensors:
        tensor.zero_()
    before_it = busy()
    mixed.copies.load_back(mixed.moves((3, 0, [7, 8], [0, 1]), (4, 1, [6], [9])))
    for layer in (1, 3):
        mixed.copies.wait_layer(layer)
    mixed.pool.prepare_states(*(np.array([value], dtype=np.int32) for value in (1, 1, 6, 2)))
    assert not before_it.query(), "the host waited"
    mixed.copies.wait_all()
    for tensor, old in zip(mixed.pool.tensors, before, strict=True):
        if tensor.shape[0] > PAGES:
            assert torch.equal(tensor[2], old[5])
            assert torch.equal(tensor[6], old[5])
        else:
            assert torch.equal(tensor[[7, 8]], old[[7, 8]])
    mixed.copies.settle()
    assert mixed.done == {1: 2, 2: 1, 3: 2, 4: 1}
    mixed.copies.close()


def move(pool: KVPool, *moves: tuple[int, int, int]) -> None:
    """(kind, source, target) of states of group 1."""
    kinds, sources, targets = (np.array(column, dtype=np.int32) for column in zip(*moves, strict=True))
    pool.prepare_states(kinds, np.ones_like(kinds), sources, targets)


def test_states_are_moved_as_the_definition_does_and_nothing_compiles_or_waits_once_it_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ran on no state, as in the warm-up. States of several sizes and types, one of them a single number."""
    from triton import knobs

    group = replace(MIXED[1], states=((4, 64, 64), (192, 3), ()), state_dtypes=("float32", "bfloat16", "float16"))
    groups, kernels = (MIXED[0], group, MIXED[2]), triton_kernels()
    for mode in ("copy", "zero"):
        request = KernelRequest(family="recurrent", mode=mode, dtype="fp32")
        assert kernels.choose(request).winner.name == "under-test:triton"
    pool, defined = make_pool(groups, kernels), make_pool(groups, kernel_registry())
    for tensor, other in zip(pool.tensors, defined.tensors, strict=True):
        tensor.normal_()
        other.copy_(tensor)
    move(pool, *[(0, -1, -1)] * 3, *[(1, -1, -1)] * 3)
    torch.cuda.synchronize()
    compiled: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(str(what.get("repr"))) and None
    )
    moves = ((1, 6, 2), (0, -1, 7), (1, 6, 99), (0, -1, 0), (1, PAGES, 5), (0, -1, 11))
    before_it = busy()
    move(pool, *moves)
    assert not before_it.query(), "the host waited"
    move(defined, *moves)
    for each in ((1, 2, 3), (0, -1, 6)):  # one at a time
        move(pool, each)
        move(defined, each)
    assert not compiled
    assert all(torch.equal(tensor, other) for tensor, other in zip(pool.tensors, defined.tensors, strict=True))


def test_a_layer_reads_its_pages_after_they_have_come_without_the_host_waiting(bench: Bench) -> None:
    k = bench.pool.layer(6).k
    expected = k[3].clone()
    bench.copies.write_back(bench.moves((1, 0, [3], [0])))
    bench.copies.settle()
    k[3].zero_()
    before_it = busy()
    bench.copies.load_back(bench.moves((2, 0, [3], [0])))
    bench.copies.wait_layer(6)
    seen = k[3].clone()
    assert not before_it.query(), "the host waited"
    torch.cuda.synchronize()
    assert torch.equal(seen, expected)


def test_a_page_is_copied_in_after_the_step_that_last_read_it(bench: Bench) -> None:
    """The scheduler has given the page to another request while the device works on the step before."""
    k = bench.pool.layer(0).k
    old = k[3].clone()
    bench.copies.write_back(bench.moves((1, 0, [4], [0])))
    bench.copies.settle()
    torch.cuda._sleep(BUSY)
    seen = k[3].clone()  # what the step before reads
    bench.copies.load_back(bench.moves((2, 0, [3], [0])))
    torch.cuda.synchronize()
    assert torch.equal(seen, old)
    assert torch.equal(k[3], k[4])


def test_a_page_is_copied_out_after_what_was_queued_before(bench: Bench) -> None:
    k = bench.pool.layer(0).k
    torch.cuda._sleep(BUSY)
    k[5].fill_(3.0)
    bench.copies.write_back(bench.moves((1, 0, [5], [7])))
    bench.copies.settle()
    part = bench.host.parts[0][0]
    size = part.tensors[0][0].numel() * 2
    row = bench.host.rows(0)[7, part.offset : part.offset + size].view(torch.bfloat16)
    assert row.eq(3.0).all()


def test_the_end_of_a_copy_is_told_only_when_it_has_ended(bench: Bench) -> None:
    torch.cuda._sleep(BUSY)
    bench.copies.write_back(bench.moves((1, 0, [5], [7])))
    bench.copies.poll()
    assert bench.done == {}
    bench.copies.settle()
    assert bench.done == {1: 1}


def test_a_captured_forward_waits_for_all_layers(bench: Bench) -> None:
    k, v = bench.pool.layer(0).k, bench.pool.layer(LAYERS - 1).v
    expected = (k[3].clone(), v[3].clone())
    bench.copies.write_back(bench.moves((1, 0, [3], [0]), (2, 1, [3], [0])))
    bench.copies.settle()
    k[3].zero_()
    v[3].zero_()
    bench.copies.load_back(bench.moves((3, 0, [3], [0]), (4, 1, [3], [0])))
    bench.copies.wait_all()
    seen = (k[3].clone(), v[3].clone())
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))

"""References of experts, recurrences, whole pages and collectives beside loops over single numbers."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tokenspeed.builtin.kernels import cache, comm, moe, recurrent


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_router_takes_the_highest_scores_and_weighs_without_the_bias(
    scoring: str, renormalize: bool, with_bias: bool
) -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(-0.3, 0.3, 9) if with_bias else None
    weights, chosen = moe.route(logits, 3, scoring, renormalize, bias)
    for row, values in enumerate(logits.tolist()):
        total = sum(math.exp(x) for x in values)
        scores = [sigmoid(x) if scoring == "sigmoid" else math.exp(x) / total for x in values]
        moved = [score + (bias[i].item() if bias is not None else 0.0) for i, score in enumerate(scores)]
        expected = sorted(range(9), key=lambda i: -moved[i])[:3]
        assert chosen[row].tolist() == expected
        whole = sum(scores[i] for i in expected) if renormalize else 1.0
        torch.testing.assert_close(weights[row], torch.tensor([scores[i] / whole for i in expected]))


def test_equal_scores_go_to_the_lower_index() -> None:
    _, chosen = moe.route(torch.zeros(1, 5), 3)
    assert chosen.tolist() == [[0, 1, 2]]


def test_experts_are_the_weighted_sum_of_their_own_swiglu() -> None:
    g = torch.Generator().manual_seed(2)
    tokens, count, hidden, inter = 4, 3, 6, 5
    x = torch.randn(tokens, hidden, generator=g)
    gate_up, down = torch.randn(count, 2 * inter, hidden, generator=g), torch.randn(count, hidden, inter, generator=g)
    weights, chosen = torch.rand(tokens, 2, generator=g), torch.tensor([[0, 2], [1, -1], [2, 1], [-1, -1]])
    expected = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for place in range(2):
            expert = int(chosen[token, place])
            if expert < 0:
                continue
            middle = [
                (gate := float(gate_up[expert, i] @ x[token]))
                * sigmoid(gate)
                * float(gate_up[expert, inter + i] @ x[token])
                for i in range(inter)
            ]
            expected[token] += weights[token, place] * (down[expert] @ torch.tensor(middle))
    torch.testing.assert_close(moe.experts(x, gate_up, down, weights, chosen), expected, rtol=1e-4, atol=1e-4)
    assert not expected[3].any()


@pytest.mark.parametrize("decays", [3, 1])
def test_a_gated_recurrence_is_carried_element_by_element_and_kept_in_its_slot(decays: int) -> None:
    g = torch.Generator().manual_seed(3)
    heads, key, value = 2, 3, 4
    q, k = torch.randn(5, heads, key, generator=g), torch.randn(5, heads, key, generator=g)
    v, decay = torch.randn(5, heads, value, generator=g), torch.rand(5, heads, decays, generator=g)
    states = torch.randn(4, heads, key, value, generator=g)
    before = states.clone()
    out = recurrent.gated_linear(q, k, v, decay, states, torch.tensor([3, 1]), torch.tensor([0, 2, 5]), 0.5)
    for slot, row in ((3, range(2)), (1, range(2, 5))):
        kept = before[slot].clone()
        for t in row:
            for h in range(heads):
                for i in range(key):
                    for j in range(value):
                        kept[h, i, j] = decay[t, h, i if decays > 1 else 0] * kept[h, i, j] + k[t, h, i] * v[t, h, j]
                for j in range(value):
                    total = sum(float(kept[h, i, j] * q[t, h, i]) for i in range(key))
                    assert float(out[t, h, j]) == pytest.approx(0.5 * total, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(states[slot], kept)
    assert torch.equal(states[[0, 2]], before[[0, 2]])


def test_a_recurrence_cut_in_two_is_the_whole_one() -> None:
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(6, 1, 4, generator=g) for _ in range(3))
    decay, slots = torch.rand(6, 1, 4, generator=g), torch.tensor([0])
    whole, parts = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4)
    expected = recurrent.gated_linear(q, k, v, decay, whole, slots, torch.tensor([0, 6]), 1.0)
    found = [
        recurrent.gated_linear(q[a:b], k[a:b], v[a:b], decay[a:b], parts, slots, torch.tensor([0, b - a]), 1.0)
        for a, b in ((0, 2), (2, 6))
    ]
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("module", [cache, recurrent])
def test_pages_and_states_are_copied_and_zeroed_where_they_are_named(module: Any) -> None:
    pages = torch.arange(1.0, 6.0).repeat_interleave(4).view(5, 2, 2)
    module.copy(pages, torch.tensor([0, 3, -1]), torch.tensor([4, -1, 2]))
    assert pages[:, 0, 0].tolist() == [1, 2, 3, 4, 1]
    module.zero(pages, torch.tensor([1, -1, 3]))
    assert pages.sum((1, 2)).tolist() == [4, 0, 12, 0, 4]


def test_collectives_of_three_ranks_give_sums_in_rank_order_and_parts_in_place(tmp_path: Path) -> None:
    size = 3
    parts = [torch.randn(6, 2, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    results: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        group = gloo(dist.FileStore(str(tmp_path / "meeting"), size), rank, size, options)  # type: ignore[attr-defined]
        summed = parts[rank].clone()
        same = comm.all_reduce(summed, group)
        scattered = comm.reduce_scatter(parts[rank], group)
        results[rank] = (summed, same is summed, comm.all_gather(parts[rank], group), scattered)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    expected = (parts[0] + parts[1]) + parts[2]
    for rank, (summed, in_place, gathered, scattered) in enumerate(results):
        assert in_place
        assert torch.equal(summed, results[0][0])
        torch.testing.assert_close(summed, expected)
        assert torch.equal(gathered, torch.cat(parts, dim=-1))
        assert torch.equal(scattered, summed[2 * rank : 2 * rank + 2])


def test_a_group_of_one_keeps_what_it_has() -> None:
    x = torch.randn(4, 3)
    assert comm.all_reduce(x, None) is x
    for kernel in (comm.all_gather, comm.reduce_scatter):
        assert torch.equal(kernel(x, None), x)
        assert kernel(x, None).data_ptr() != x.data_ptr()

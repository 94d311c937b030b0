"""Captured decode steps give the tokens of uncaptured ones; what is captured is only recorded here, where no device is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from tokenspeed.runtime.graphs import DecodeGraphs, capture_sizes
from tokenspeed.runtime.mixed_graphs import MixedGraphs


def next_token(tokens: list[int]) -> int:
    """What the stand-in model of ``conftest`` says after ``tokens``."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % 997


class Recorder:
    """Stands in for a platform: keeps what was captured, and counts replays."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        run()

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


def with_graphs(rig, sizes: tuple[int, ...]) -> Recorder:
    """Let ``rig`` replay graphs of ``sizes``; the stand-in model must not write where no row is (-1)."""
    executor, platform = rig.executor, Recorder()
    model = executor._model
    forward = model.forward

    def masked(batch):
        kept = batch.slot_mapping[0] >= 0
        last = model.pages.view(-1)[-1].clone()
        hidden = forward(batch)
        if not kept.all():
            model.pages.view(-1)[-1] = last
        return hidden

    model.forward = masked
    graphs = DecodeGraphs(
        model=model,
        backends=[],
        argmax=executor._sampler._argmax,
        tables=executor._tables,
        page_sizes=[4],
        last_tokens=executor.last_tokens,
        sizes=sizes,
        vocab_size=997,
        dtype=torch.float32,
        max_seq_len=200,
    )
    graphs.capture(platform)
    executor.use_graphs(graphs)
    return platform


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sizes", [(8,), (1, 2, 4), (1, 2, 4, 8)])
def test_tokens_are_those_of_steps_that_are_not_captured(make_rig, expected, overlap, sizes):
    rig = make_rig(overlap=overlap, pages=96)
    platform = with_graphs(rig, sizes)
    assert platform.captured == len(sizes)
    prompts = [[i * 7 + j for j in range(3 + 5 * i)] for i in range(8)]
    for rid, prompt in enumerate(prompts):
        rig.add(rid, prompt, max_new_tokens=4 + rid)
    rig.run()
    assert [rig.tokens(rid) for rid in range(8)] == [expected(p, 4 + rid) for rid, p in enumerate(prompts)]
    assert platform.replayed > 0


def test_other_ways_of_drawing_use_the_logits_of_the_graph(make_rig):
    plain, captured = make_rig(), make_rig()
    platform = with_graphs(captured, (1, 4))
    for rig in (plain, captured):
        rig.add(0, [1, 2, 3], temperature=0.9, seed=5, max_new_tokens=10)
        rig.add(1, [4, 5], max_new_tokens=10)
        rig.run()
    assert captured.tokens(0) == plain.tokens(0)
    assert captured.tokens(1) == plain.tokens(1)
    assert platform.replayed > 0


def test_a_row_without_numbers_fails_alone_under_a_graph(make_rig, expected):
    prompt = [9, 8, 7]
    poison = expected(prompt, 3)[-1]
    rig = make_rig(poison=poison, overlap=True)
    with_graphs(rig, (4,))
    rig.add(0, prompt, max_new_tokens=8)
    rig.add(1, [1, 2], max_new_tokens=3)
    rig.run()
    assert rig.last(0).finish == "error"
    assert rig.tokens(1) == expected([1, 2], 3)


def test_sizes_grow_with_the_rows_and_end_at_the_most():
    assert capture_sizes(1) == (1,)
    assert capture_sizes(20) == (1, 2, 4, 8, 16, 20)
    sizes = capture_sizes(256)
    assert sizes[-1] == 256
    assert all(b <= 2 * a for a, b in pairwise(sizes))
    assert capture_sizes(16, (64, 4, 2)) == (2, 4)


def with_mixed(rig, tokens: tuple[int, ...], rows: tuple[int, ...]) -> Recorder:
    """Let ``rig`` replay mixed graphs of these sizes, and decode graphs of one size."""
    with_graphs(rig, (8,))
    executor, platform = rig.executor, Recorder()
    model = executor._model

    def forward(batch):
        """The stand-in model over the rows that are there; it knows nothing of filling."""
        if not batch.captured:
            return plain(batch)
        kept = batch.slot_mapping[0] >= 0
        model.pages.view(-1)[batch.slot_mapping[0][kept]] = batch.input_ids[kept].float() + 1
        hidden = torch.zeros((batch.num_tokens, 2))
        start = batch.query_start.tolist()
        for row in range(batch.num_rows):
            seq_len, new = int(batch.seq_lens[row]), start[row + 1] - start[row]
            if not new or not bool(kept[start[row]]):
                continue
            table = batch.page_tables[0][row, : -(-seq_len // 4)].long()
            context = (model.pages[table].reshape(-1)[:seq_len] - 1).long().tolist()
            assert batch.positions[start[row] : start[row + 1]].tolist() == list(range(seq_len - new, seq_len))
            for i in range(new):
                seen = context[: seq_len - new + i + 1]
                hidden[start[row] + i] = torch.tensor([next_token(seen), seen[-1]])
        return hidden

    plain, model.forward = model.forward, forward
    graphs = MixedGraphs(
        model=model,
        backends=[],
        argmax=executor._sampler._argmax,
        tables=executor._tables,
        page_sizes=[4],
        last_tokens=executor.last_tokens,
        tokens=tokens,
        rows=rows,
        vocab_size=997,
        dtype=torch.float32,
        max_seq_len=200,
    )
    graphs.capture(platform)
    executor.use_graphs(executor._graphs, graphs)
    return platform


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_of_prompts_and_decodes_give_the_tokens_of_steps_that_are_not_captured(make_rig, expected, overlap):
    rig = make_rig(overlap=overlap, pages=160, budget=24)
    assert rig.executor.mixed_sizes == ()
    platform = with_mixed(rig, (16, 32), (2, 8))
    assert rig.executor.mixed_sizes == (16, 32)
    prompts = [[i * 7 + j for j in range(2 + 9 * i)] for i in range(8)]
    for rid, prompt in enumerate(prompts):
        rig.add(rid, prompt, max_new_tokens=20, **({"temperature": 0.8, "seed": 1} if rid == 7 else {}))
        rig.turn()
        rig.turn()
    rig.run()
    assert [rig.tokens(rid) for rid in range(7)] == [expected(prompt, 20) for prompt in prompts[:7]]
    assert platform.replayed > 5
    alone = make_rig(pages=160)
    alone.add(0, prompts[7], max_new_tokens=20, temperature=0.8, seed=1)
    alone.run()
    assert rig.tokens(7) == alone.tokens(0)

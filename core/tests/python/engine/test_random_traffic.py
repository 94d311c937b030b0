"""Random traffic through random engines: whatever is added, aborted, stopped, retracted, shared and overlapped, each request gets its own tokens, ends
once, and everything is given back.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tokenspeed.messages import AbortRequest, StopRequest


def play(make_rig: Any, expected: Any, seed: int) -> int:
    """One engine's life; the retractions that happened in it."""
    draw = random.Random(seed)
    pages, length = draw.choice([20, 30, 50, 120]), draw.choice([60, 120])
    ends = {draw.randrange(997) for _ in range(draw.choice([0, 60]))}
    rig = make_rig(
        pages=pages,
        max_num_seqs=draw.choice([1, 3, 8]),
        budget=draw.choice([4, 9, 16, 64]),
        max_model_len=length,
        overlap=draw.random() < 0.5,
        prefix_caching=draw.random() < 0.8,
        end_ids=ends,
    )
    bases = [[draw.randrange(900) for _ in range(60)] for _ in range(2)]
    wanted: list[tuple[list[int], int, bool]] = []
    cut: set[int] = set()
    for _ in range(draw.randrange(10, 150)):
        if draw.random() < 0.35:
            own = [draw.randrange(900) for _ in range(draw.randrange(1, 9))]
            prompt = draw.choice(bases)[: draw.randrange(0, 50)] + own
            count, ignore = draw.choice([1, 2, 8, 40]), draw.random() < 0.5
            rig.add(
                len(wanted),
                prompt,
                max_new_tokens=count,
                ignore_eos=ignore,
                priority=draw.choice([0, 0, 3, -2]),
                logprobs=draw.choice([-1, 1]),
                prompt_logprobs=draw.choice([-1, -1, 0]),
            )
            wanted.append((prompt, count, ignore))
        if draw.random() < 0.08 and wanted:
            victim = draw.randrange(len(wanted))
            if not any(item.finish for item in rig.outputs.get(victim, [])):
                cut.add(victim)
            rig.send(draw.choice([AbortRequest, StopRequest])(victim))
        rig.turn()
    rig.run(20_000)
    for rid, (prompt, count, ignore) in enumerate(wanted):
        answer = expected(prompt, count)
        if not ignore:
            answer = answer[: next((i + 1 for i, token in enumerate(answer) if token in ends), count)]
        tokens, last = rig.tokens(rid), rig.last(rid)
        assert tokens == answer[: len(tokens)], (seed, rid)
        if rid in cut or last.finish == "error":
            assert not last.error or not tokens, (seed, rid)
        elif tokens != answer:  # the pool or the model's length was the limit
            assert last.finish == "length", (seed, rid)
            assert len(prompt) + len(tokens) >= min(4 * pages, length) - 1, (seed, rid)
        else:
            stopped = not ignore and answer[-1] in ends
            assert last.finish == ("stop" if stopped else "length"), (seed, rid)
    figures = rig.gauges.now()
    assert (figures.pages_active, figures.running, figures.waiting) == (0, 0, 0), seed
    assert figures.pages_free + figures.pages_cached == pages, seed
    assert figures.finished + figures.aborted + figures.failed == len(wanted), seed
    retractions: int = figures.retractions
    return retractions


def test_random_traffic(make_rig: Any, expected: Any) -> None:
    """Seed 4 among them exchanges pages in a plan without rows."""
    assert sum(play(make_rig, expected, seed) for seed in range(30)) > 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_much_random_traffic(make_rig: Any, expected: Any) -> None:
    for seed in range(1000, 2500):
        play(make_rig, expected, seed)

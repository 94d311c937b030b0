"""What a prefix hit of several cache groups is, by its definition: where nothing is evicted, no reuse is lost."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from engine_model import Engine, make_config
from hypothesis import given, settings

from tokenspeed import _scheduler as ts

PLENTY = 2_000


def window(page: int, tokens: int, **options: int) -> ts.CacheGroupConfig:
    return ts.CacheGroupConfig(
        page_size=page, num_pages=PLENTY, kind=ts.CacheGroupKind.WINDOW, window=tokens, **options
    )


def recurrent(interval: int, **options: int) -> ts.CacheGroupConfig:
    return ts.CacheGroupConfig(page_size=interval, num_pages=PLENTY, kind=ts.CacheGroupKind.RECURRENT, **options)


def longest_boundary(prompt: list[int], served: list[list[int]], page: int, step: int) -> int:
    """Tokens: whole blocks shared with one who was served, before the last token, down to a multiple of every interval."""
    shared = 0
    for tokens in served:
        same = 0
        while same < min(len(tokens), len(prompt)) and tokens[same] == prompt[same]:
            same += 1
        shared = max(shared, same)
    blocks = min(shared, len(prompt) - 1) // page
    return (blocks * page) // step * step


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    page=st.sampled_from([1, 2, 4]),
    budget=st.integers(3, 40),
    overlap=st.integers(0, 1),
    windows=st.lists(st.integers(1, 12), max_size=2),
    intervals=st.lists(st.integers(1, 3), max_size=2),
    prompts=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40), st.integers(0, 5), st.integers(1, 9)), min_size=2, max_size=6),
)  # fmt: skip
def test_a_hit_is_the_longest_boundary_of_all_groups(
    page: int,
    budget: int,
    overlap: int,
    windows: list[int],
    intervals: list[int],
    prompts: list[tuple[int, int, int, int]],
) -> None:
    further = [window(page, tokens) for tokens in windows] + [recurrent(page * many) for many in intervals]
    engine = Engine(
        make_config(page=page, pages=PLENTY, budget=budget, overlap=overlap, further=further, model_len=100)
    )
    step = math.lcm(page, *(page * many for many in intervals))
    served: list[list[int]] = []
    for number, (family, shared, own, new) in enumerate(prompts):
        prompt = [100 * family + i for i in range(shared)] + [1_000 + number] * own
        assert engine.submit(number, prompt, new).accepted
        engine.drain()
        info = engine.scheduler.request_info(number)
        assert info is not None
        assert info.cached_tokens == longest_boundary(prompt, served, page, step)
        served.append(prompt + [7] * (new - 1))  # the last token of an output has no KV


@pytest.mark.parametrize("policy", list(ts.WritePolicy))
def test_a_second_turn_finds_the_boundary_on_the_host_as_it_would_on_the_device(policy: ts.WritePolicy) -> None:
    """The device pools hold one request; a session's last boundary comes back whatever the write policy."""
    page, step = 4, 8
    small = [
        ts.CacheGroupConfig(page_size=4, num_pages=6, kind=ts.CacheGroupKind.WINDOW, window=10, host_pages=64),
        ts.CacheGroupConfig(page_size=8, num_pages=3, kind=ts.CacheGroupKind.RECURRENT, host_pages=64),
    ]
    engine = Engine(
        make_config(page=page, pages=12, seqs=1, further=small, host=128, write_policy=policy, retain_percent=100)
    )
    prompt = list(range(30))
    engine.submit(1, prompt, 3, session=1, retain_us=10_000_000)
    engine.drain()
    for other in range(2, 6):
        engine.submit(other, [1_000 * other + i for i in range(40)], 3)
        engine.drain()
    turn = [*prompt, 7, 7, 500, 501, 502]
    engine.submit(9, turn, 3)
    engine.drain()
    info = engine.scheduler.request_info(9)
    assert info is not None
    assert info.cached_tokens == longest_boundary(turn, [[*prompt, 7, 7]], page, step) == 32
    assert info.host_tokens > 0

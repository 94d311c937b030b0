"""``/v1/completions``: prompts in every form, echo, log probabilities, usage."""

from __future__ import annotations

import pytest

from tokenspeed.testing.fake_engine import Reply
from tokenspeed.testing.server import events, running, streamed_text

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("prompt", "rows"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([97, 98], ["ab"]), ([[97], [98, 99]], ["a", "bc"])],
)
async def test_prompts_in_every_form(prompt: object, rows: list[str]) -> None:
    async with running("x") as server:
        body = (await server.complete(prompt, n=2)).json()
        seen = [bytes(request.tokens[::4]).decode() for request in server.engine.requests]
    assert seen == [row for row in rows for _ in range(2)]
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(rows)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, rows))


async def test_sixteen_tokens_are_the_default() -> None:
    async with running("x" * 40) as server:
        (choice,) = (await server.complete()).json()["choices"]
    assert choice["text"] == "x" * 16
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_repeats_the_prompt(stream: bool) -> None:
    async with running("def") as server:
        response = await server.complete("abc", echo=True, stream=stream)
        from_ids = (await server.complete([97, 98], echo=True)).json()["choices"][0]["text"]
    text = streamed_text(events(response.text)) if stream else response.json()["choices"][0]["text"]
    assert text == "abcdef"
    assert from_ids == "abdef"


@pytest.mark.parametrize("stream", [False, True])
async def test_api_13_scoring_a_prompt(stream: bool) -> None:
    """api-13: echo with max_tokens 0 and logprobs scores the prompt, samples nothing that is shown or counted, and the next request works."""
    async with running("zzz") as server:
        fields = {"echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        response = await server.complete("sky", **fields)
        assert response.status_code == 200
        assert (await server.complete("ok")).status_code == 200
    if stream:
        chunks = events(response.text)
        text, usage = streamed_text(chunks), chunks[-1]["usage"]
        logprobs, reason = chunks[0]["choices"][0]["logprobs"], chunks[-2]["choices"][0]["finish_reason"]
    else:
        body = response.json()
        (choice,) = body["choices"]
        text, usage, logprobs, reason = choice["text"], body["usage"], choice["logprobs"], choice["finish_reason"]
    assert text == "sky"
    assert reason == "length"
    assert usage["completion_tokens"] == 0
    assert logprobs == {
        "tokens": ["s", "k", "y"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"k": -1.0}, {"y": -2.0}],
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_api_01_usage_comes_as_one_last_chunk_when_asked_for(route: str) -> None:
    """api-01: one chunk with empty choices before [DONE], null before it, and none without the option; counts add up."""
    async with running("hello") as server:
        send = getattr(server, route)
        chunks = events((await send(stream=True, max_tokens=5, stream_options={"include_usage": True})).text)
        without = events((await send(stream=True, max_tokens=5)).text)
        continuous = events(
            (await send(stream=True, max_tokens=5, stream_options={"continuous_usage_stats": True})).text
        )
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert not any(chunk.get("usage") for chunk in without)
    assert all(chunk["choices"] for chunk in without)
    assert [chunk["usage"]["completion_tokens"] for chunk in continuous][-1] == 5


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_api_22_cached_tokens_is_always_a_number(route: str) -> None:
    """api-22: 0 on a cold request, the engine's number on a warm one, streamed and not; never above the prompt's length (ops-07)."""
    cached = iter([0, 4, 4, 10_000])
    async with running(lambda _: Reply(tokens=[97, 256], cached=next(cached))) as server:
        send = getattr(server, route)
        cold = (await send("a prompt")).json()["usage"]
        warm = (await send("a prompt")).json()["usage"]
        streamed = events((await send("a prompt", stream=True, stream_options={"include_usage": True})).text)[-1][
            "usage"
        ]
        absurd = (await send("a prompt")).json()["usage"]
        metrics = await server.metrics()
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in (cold, warm, streamed)] == [0, 4, 4]
    assert absurd["prompt_tokens_details"]["cached_tokens"] == absurd["prompt_tokens"]
    assert "tokenspeed:metrics_clamped_total 1.0" in metrics


async def test_usage_holds_what_each_request_cost() -> None:
    async with running("hello") as server:
        (stats,) = (await server.complete("abcd")).json()["usage"]["request_stats"]
    assert {
        "queue_ms",
        "prefill_ms",
        "ttft_ms",
        "total_ms",
        "preemptions",
        "preempted_ms",
        "decode_tok_s",
        "hit_rate",
    } <= set(stats)
    assert (stats["prompt_tokens"], stats["cached_tokens"], stats["output_tokens"]) == (4, 0, 6)

"""A client that leaves costs nothing any more, in whatever state its request is."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from tokenspeed.messages import GenerateRequest, Outputs, TokenOutput
from tokenspeed.testing.fake_engine import Reply
from tokenspeed.testing.server import Running, running, until

pytestmark = pytest.mark.anyio

NEVER = Reply(tokens=(), finish=None)
ENDLESS = Reply(tokens=[97] * 100_000, finish=None)


async def post_raw(server: Running, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets.port)
    content = json.dumps({"prompt": "hi", "max_tokens": 500, **body}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reply", [NEVER, ENDLESS], ids=["queued-or-prefill", "decoding"])
async def test_api_25_a_closed_connection_aborts_at_once(stream: bool, reply: Reply) -> None:
    """api-25: while queued, in prefill and decoding, streamed and not; the engine is told, and its gauges fall."""
    async with running(lambda _: reply, step_s=0.005) as server:
        reader, writer = await post_raw(server, {"stream": stream, "n": 2})
        await until(lambda: len(server.engine.running) == 2)
        if stream and reply is ENDLESS:
            await reader.readuntil(b"data: ")
        writer.close()
        await until(lambda: len(server.engine.aborts) == 2)
        await until(lambda: not server.engine.running)
        assert server.llm.live_requests == 0
        await until(lambda: server.llm.client.stats is not None and server.llm.client.stats.running == 0)


async def test_ops_06_every_request_is_accounted_for_when_all_clients_leave() -> None:
    """ops-06: 50 streams, all sockets closed: gauges idle, and finished by reason sums to submitted."""
    async with running(lambda _: ENDLESS, step_s=0.005) as server:
        writers = [(await post_raw(server, {"stream": True}))[1] for _ in range(50)]
        await until(lambda: len(server.engine.running) == 50)
        assert (await server.complete("x", max_tokens=3)).status_code == 200
        for writer in writers:
            writer.close()
        await until(lambda: not server.engine.running and server.llm.live_requests == 0)
        await until(lambda: server.llm.client.stats.running == 0)
        text = await server.metrics()
    assert "tokenspeed:num_requests_running 0.0" in text
    assert 'tokenspeed:requests_finished_total{reason="abort"} 50.0' in text
    assert 'tokenspeed:requests_aborted_total{reason="disconnect"} 50.0' in text
    finished = sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("tokenspeed:requests_finished_total{")
    )
    assert f"tokenspeed:requests_total {finished}" in text


async def test_ops_16_orphans_are_aborted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """ops-16: outputs for a request that the server does not know end it in the engine with one line in the log."""
    caplog.set_level(logging.WARNING, "tokenspeed.serving")
    async with running() as server:
        for _ in range(200):
            await server.engine.send(Outputs([TokenOutput(987_654, [1])]))
        await until(lambda: server.llm.metrics.orphans >= 1 and 987_654 in server.engine.aborts)
        assert server.engine.aborts.count(987_654) == 1
        assert (await server.complete()).status_code == 200
    assert len([record for record in caplog.records if "does not know" in record.message]) == 1


async def test_ops_21_a_turn_that_was_left_leaves_nothing_behind() -> None:
    """ops-21: turns are whole requests; the next one after a left one sends its own full conversation to the engine."""
    async with running(lambda _: ENDLESS, step_s=0.005) as server:
        _, writer = await post_raw(server, {"stream": True, "prompt": "turn one"})
        await until(lambda: len(server.engine.running) == 1)
        writer.close()
        await server.complete("turn one, then two", max_tokens=2)
        await until(lambda: not server.engine.running)
        assert bytes(server.engine.requests[-1].tokens[::4]).decode() == "turn one, then two"


async def test_a_slow_reader_neither_blocks_the_others_nor_loses_text() -> None:
    """A client that does not read gets everything later; another one is served meanwhile."""
    async with running(
        lambda request: Reply(tokens=[97] * request.params.max_new_tokens + [256]), max_model_len=60_000
    ) as server:
        reader, writer = await post_raw(server, {"stream": True, "max_tokens": 20_000})
        await until(lambda: len(server.engine.requests) == 1)
        assert (await server.complete("x", max_tokens=3)).status_code == 200
        received = 0
        while line := await asyncio.wait_for(reader.readline(), 60):
            if b'"text":' in line:
                received += len(json.loads(line.split(b"data: ")[1])["choices"][0]["text"])
            if b"[DONE]" in line:
                break
        writer.close()
    assert received == 20_000


async def test_two_hundred_streams_at_once_lose_and_mix_nothing() -> None:
    """Each of 200 connections gets its own text in full, token by token."""

    def script(request: GenerateRequest) -> Reply:
        prompt = bytes(request.tokens[::4])
        return Reply(tokens=[*(prompt + b" ") * 20, 256])

    async with running(script, step_s=0.001) as server:

        async def one(name: str) -> str:
            reader, writer = await post_raw(server, {"stream": True, "prompt": name})
            text = ""
            while b"[DONE]" not in (line := await asyncio.wait_for(reader.readline(), 60)):
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
            writer.close()
            return text

        names = [f"stream-{i}" for i in range(200)]
        assert await asyncio.gather(*map(one, names)) == [f"{name} " * 20 for name in names]

"""When the engine fails, dies or hangs, clients and probes are told."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import pytest

from tokenspeed.messages import EngineReady
from tokenspeed.serving.engine_client import EngineClient
from tokenspeed.testing.fake_engine import Reply
from tokenspeed.testing.server import running, until

pytestmark = pytest.mark.anyio

#: A token, and then nothing more.
UNENDING = Reply(tokens=[97], finish=None)
#: How long anything may take on a machine that is busy with other things.
PATIENCE_S = 30.0


async def test_ops_04_open_requests_fail_and_new_ones_are_503_when_the_engine_fails() -> None:
    """ops-04: a stream ends with an error event, a whole answer with 503, /health and new requests are 503."""
    async with running(lambda _: UNENDING, step_s=0.005) as server:
        body = {"prompt": "x", "stream": True}
        async with server.http.stream("POST", "/v1/completions", json=body) as streamed:
            assert streamed.status_code == 200
            pieces = streamed.aiter_text()
            await anext(pieces)
            whole = asyncio.create_task(server.chat())
            await until(lambda: len(server.engine.running) == 2)
            await server.engine.fail("out of memory")
            text = "".join([piece async for piece in pieces])
        answered = await asyncio.wait_for(whole, PATIENCE_S)
        assert '"error":{"message":"the engine failed: out of memory"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert answered.status_code == 503
        assert answered.json()["error"]["type"] == "server_error"
        for response in (await server.http.get("/health"), await server.complete(), await server.chat(stream=True)):
            assert response.status_code == 503
            assert response.headers["retry-after"]
        metrics = await server.metrics()
    assert "tokenspeed:engine_up 0.0" in metrics
    assert 'tokenspeed:requests_finished_total{reason="error"} 2.0' in metrics


async def test_ops_04_a_hung_engine_turns_health_red_and_its_return_turns_it_green() -> None:
    """ops-04: missed heartbeats, as after SIGSTOP; the engine may come back."""
    async with running(hung_after_s=2, heartbeat_s=0.05) as server:
        server.engine.answering = False
        end = time.monotonic() + 2 * PATIENCE_S
        while (await server.http.get("/health")).status_code == 200:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        assert (await server.complete()).status_code == 503
        server.engine.answering = True
        for answer in (lambda: server.http.get("/health"), server.complete):
            while (await answer()).status_code != 200:
                assert time.monotonic() < end
                await asyncio.sleep(0.02)


async def test_the_end_of_a_process_is_seen_at_once() -> None:
    """A sentinel that becomes readable fails the client within one turn of the loop, with the engine's last words."""
    read, write = os.pipe()
    client = EngineClient(
        "ipc:///tmp/never-bound-to",
        "ipc:///tmp/never-bound-from",
        [read],
        last_words=lambda: "rank 0 was killed by signal 9",
    )
    seen: list[str] = []
    client.start(lambda _: None, lambda error: seen.append(str(error)))
    os.close(write)
    await asyncio.wait_for(client.settled.wait(), PATIENCE_S)
    assert seen == ["rank 0 was killed by signal 9"]
    assert client.failure is not None
    client.close()
    os.close(read)


async def test_ops_10_bad_frames_are_dropped_and_counted() -> None:
    """ops-10: random bytes, a pickle, truncated and foreign messages change nothing but a counter."""
    async with running() as server:
        for frame in (
            b"",
            b"\x00\xff" * 50,
            b"\x80\x04\x95cos\nsystem\n.",
            b"\xdf\xff\xff\xff\xff",
            b"\x92\xa7outputs\xc0",
            b"\x91" * 100_000,
        ):
            await server.engine.send_raw(frame)
        assert (await server.complete()).status_code == 200
        assert "tokenspeed:bad_frames_total 6.0" in await server.metrics()


async def test_until_the_engine_is_ready_everything_answers_503() -> None:
    """The port is open from the start; work is refused with Retry-After until the first word of the engine."""
    async with running(ready=False) as server:
        for response in (
            await server.http.get("/health"),
            await server.chat(),
            await server.http.post("/tokenize", json={"prompt": "x"}),
            await server.http.get("/v1/models"),  # how long a request may be is not known yet
        ):
            assert response.status_code == 503
        await server.engine.send(EngineReady(server.engine.info))
        await asyncio.wait_for(server.llm.client.settled.wait(), PATIENCE_S)
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.chat()).status_code == 200


async def test_a_server_that_stood_still_does_not_take_its_engine_for_hung() -> None:
    """A paused machine: the engine could not be asked meanwhile, and a probe that comes first afterwards finds it well."""
    async with running(hung_after_s=3, heartbeat_s=0.05) as server:
        server.engine.answering = False
        await asyncio.sleep(0.2)
        time.sleep(3.5)
        await asyncio.sleep(0.2)  # the watch looks
        assert not server.context.llm.client.hung
        server.engine.answering = True
        assert (await server.http.get("/health")).status_code == 200


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="CPU time of other processes is read from /proc")
async def test_an_engine_that_works_and_says_nothing_has_longer_until_it_counts_as_hung() -> None:
    """A single step may be long. The process that works is this one."""
    limits = {"hung_after_s": 0.5, "busy_limit_s": 2.5, "heartbeat_s": 0.05}
    async with running(**limits, pids=[os.getpid()]) as server:  # type: ignore[arg-type]
        client = server.context.llm.client
        began_s = time.monotonic()
        server.engine.answering = False
        await until(lambda: client.hung)
        assert time.monotonic() - began_s > 1.5  # what was heard last may be some heartbeats old
        assert (await server.http.get("/health")).status_code == 503
        server.engine.answering = True
        await until(lambda: not client.hung)
        assert client.failure is None


async def test_a_control_route_does_not_wait_for_a_hung_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(hung_after_s=0.3, heartbeat_s=0.05) as server:
        client = server.context.llm.client
        server.engine.answering = False
        await until(lambda: client.hung)
        asked: list[str] = []

        async def ask(method: str) -> None:
            asked.append(method)

        monkeypatch.setattr(client, "control", ask)
        assert (await server.control.post("/flush_cache")).status_code == 503
        assert asked == []

"""What happens when things end: an engine that dies, a client that leaves, a server that is told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil

from .conftest import MODEL
from .streams import Stream, open_stream

TOY = ("toy", "--plugins", "none")


def long_body(server: Any, prompt: str = "abc", tokens: int = 400) -> dict[str, Any]:
    return {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": 1,
        "ignore_eos": True,
    }


async def start_streams(
    client: httpx.AsyncClient, server: Any, count: int, tokens: int = 400
) -> tuple[list[Stream], list[asyncio.Task[Stream]]]:
    """Streams that have all got their first text."""
    streams = [Stream() for _ in range(count)]
    bodies = [long_body(server, f"prompt {i}", tokens) for i in range(count)]
    tasks = [
        asyncio.create_task(open_stream(client, server.url, body, stream))
        for body, stream in zip(bodies, streams, strict=True)
    ]
    await asyncio.gather(*(stream.first.wait() for stream in streams))
    return streams, tasks


async def first_status(url: str, wanted: int, timeout_s: float) -> float:
    """Seconds until ``/health`` answers ``wanted``."""
    begin = time.monotonic()
    async with httpx.AsyncClient(trust_env=False, timeout=2) as client:
        while time.monotonic() - begin < timeout_s:
            try:
                if (await client.get(f"{url}/health")).status_code == wanted:
                    return time.monotonic() - begin
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.01)
    raise AssertionError(f"/health never answered {wanted}")


def test_a_killed_engine_ends_streams_with_an_error_and_then_the_server(serve: Callable[..., Any]) -> None:
    """ops-04: open streams end with an error and /health is 503 within 2 s; the server exits with a failure soon after; nothing hangs."""
    server = serve()
    (engine,) = server.engines()

    async def scenario() -> tuple[list[Stream], float, float]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            streams, tasks = await start_streams(client, server, 4, tokens=2000)
            killed = time.monotonic()
            os.kill(engine, signal.SIGKILL)
            health_s, *_ = await asyncio.gather(first_status(server.url, 503, 2.0), *tasks)
            return streams, killed, health_s

    streams, killed, health_s = asyncio.run(scenario())
    assert health_s <= 2.0
    for stream in streams:
        assert stream.error
        assert stream.finish is None
        assert stream.ended_s - killed <= 2.0
    assert server.process.wait(15) != 0


def test_a_client_that_leaves_frees_its_pages_at_once(serve: Callable[..., Any]) -> None:
    """api-25: the request is aborted within about one step; the gauges fall to idle."""
    server = serve()

    async def scenario() -> None:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            _, tasks = await start_streams(client, server, 3, tokens=2000)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    idle = server.wait_for(lambda m: m["num_requests_running"] == 0 and m['kv_pages{state="active"}'] == 0, 15.0)
    assert idle['requests_aborted_total{reason="disconnect"}'] == 3
    deadline = time.monotonic() + 15
    while True:  # a step may have been under way
        steps = server.metrics()["engine_steps_total"]
        time.sleep(0.5)
        if server.metrics()["engine_steps_total"] == steps:
            break
        assert time.monotonic() < deadline, "the engine goes on computing for nobody"


def test_sigterm_lets_running_requests_finish(serve: Callable[..., Any]) -> None:
    """ops-01, ops-03: new requests get 503, running ones finish, a second SIGTERM changes nothing, the exit status is 0."""
    server = serve(MODEL, "--drain-timeout-s", "600")  # however slow the machine is

    async def scenario() -> list[Stream]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            streams, tasks = await start_streams(client, server, 4, tokens=200)
            server.process.send_signal(signal.SIGTERM)
            await first_status(server.url, 503, 15.0)
            refused = await open_stream(client, server.url, long_body(server))
            assert refused.status == 503
            server.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*tasks)
            return streams

    for stream in asyncio.run(scenario()):
        assert stream.error == ""
        assert stream.done
        assert stream.finish == "length"
        assert stream.usage is not None
        assert stream.usage["completion_tokens"] == 200
    assert server.process.wait(15) == 0


def test_an_occupied_port_is_noticed_before_the_model_is_loaded(serve: Callable[..., Any]) -> None:
    """ops-15: a clear line and a failing exit status; it is not even seen that there is no such model."""
    server = serve(*TOY)
    second = serve("/no/such/model", "--port", str(server.port), wait=False)
    assert second.process.wait(60) != 0
    assert str(server.port) in second.output()
    assert "Traceback" not in second.output()
    assert "/no/such/model" not in second.output()
    assert server.get("/health").status_code == 200


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody reaps stays a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_no_process_outlives_its_server(serve: Callable[..., Any]) -> None:
    """A server that is killed outright takes its engine with it."""
    server = serve(*TOY)
    (engine,) = server.engines()
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + 15
    while not gone(engine):
        assert time.monotonic() < deadline
        time.sleep(0.05)

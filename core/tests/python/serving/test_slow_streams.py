"""Streams that have nothing to tell for long: headers and comments go out, refusals keep their status."""

from __future__ import annotations

import asyncio

import pytest

from tokenspeed.serving import sse
from tokenspeed.testing.fake_engine import Reply
from tokenspeed.testing.server import events, running, until

pytestmark = pytest.mark.anyio

ROUTES = {
    "/v1/completions": {"prompt": "x", "stream": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "stream": True},
    "/generate": {"text": "x", "stream": True},
}


def silence(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """How long a stream may have nothing to tell before its headers, and between its events."""
    monkeypatch.setattr(sse, "_FIRST_WORD_S", seconds)
    monkeypatch.setattr(sse, "_KEEP_ALIVE_S", seconds)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_that_waits_gets_headers_and_comments(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy with an idle limit sees that the connection lives, before the first token and between two."""
    silence(monkeypatch, 0.1)
    async with running("hi") as server:
        server.engine.answering = False
        async with server.http.stream("POST", path, json=ROUTES[path]) as response:
            assert response.status_code == 200
            pieces = response.aiter_text()
            begin = ""
            while begin.count(": waiting\n\n") < 3:
                begin += await anext(pieces)
            server.engine.answering = True
            rest = "".join([piece async for piece in pieces])
    assert begin == ": waiting\n\n" * begin.count(":")
    assert events(rest.replace(": waiting\n\n", ""))


async def test_a_stream_that_tells_something_has_no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    silence(monkeypatch, 60)
    async with running("hello", step_s=0.01) as server:
        text = (await server.complete(stream=True)).text
    assert ": waiting" not in text


async def test_a_refusal_of_the_engine_has_a_status_before_the_headers_and_is_an_event_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(lambda _: Reply(error="too long")) as server:
        silence(monkeypatch, 60)
        response = await server.complete(stream=True)
        assert response.status_code == 400
        silence(monkeypatch, 0.1)
        server.engine.answering = False
        path = "/v1/completions"
        async with server.http.stream("POST", path, json=ROUTES[path]) as late:
            assert late.status_code == 200
            pieces = late.aiter_text()
            text = await anext(pieces)
            server.engine.answering = True
            text += "".join([piece async for piece in pieces])
        assert text.startswith(": waiting\n\n")
        assert '"error":{"message":"too long"' in text
        assert text.endswith("data: [DONE]\n\n")


async def test_a_client_that_leaves_a_waiting_stream_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the headers, and behind them, before the first event."""
    path = "/v1/completions"
    async with running(lambda _: Reply(finish=None)) as server:
        silence(monkeypatch, 60)
        early = asyncio.create_task(server.http.post(path, json=ROUTES[path]))
        await until(lambda: len(server.engine.requests) == 1)
        assert not early.done()
        early.cancel()
        await asyncio.wait((early,))
        await until(lambda: len(server.engine.aborts) == 1)
        silence(monkeypatch, 0.1)
        async with server.http.stream("POST", path, json=ROUTES[path]) as response:
            assert (await anext(response.aiter_text())).startswith(": waiting\n\n")
        await until(lambda: len(server.engine.aborts) == 2)
        assert server.llm.live_requests == 0
        assert server.llm.metrics.aborted == {"disconnect": 2}

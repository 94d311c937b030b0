"""Streams that have nothing to tell for long: headers and comments go out, refusals keep their status."""

from __future__ import annotations

import asyncio

import httpx
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


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "_FIRST_WORD_S", 0.1)
    monkeypatch.setattr(sse, "_KEEP_ALIVE_S", 0.1)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_that_waits_gets_headers_and_comments(path: str) -> None:
    """A proxy with an idle limit sees that the connection lives, before the first token and between two."""
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


async def test_a_stream_that_tells_something_has_no_comments() -> None:
    async with running("hello", step_s=0.01) as server:
        text = (await server.complete(stream=True)).text
    assert ": waiting" not in text


async def test_a_refusal_of_the_engine_has_a_status_before_the_headers_and_is_an_event_behind_them() -> None:
    async with running(lambda _: Reply(error="too long")) as server:
        response = await server.complete(stream=True)
        assert response.status_code == 400
        server.engine.answering = False
        late = asyncio.create_task(server.complete(stream=True))
        await asyncio.sleep(0.3)
        server.engine.answering = True
        response = await late
        assert response.status_code == 200
        assert response.text.startswith(": waiting")
        assert '"error":{"message":"too long"' in response.text
        assert response.text.endswith("data: [DONE]\n\n")


async def test_a_client_that_leaves_a_waiting_stream_ends_its_request() -> None:
    """Behind the headers, before the first event."""
    async with running(lambda _: Reply(finish=None)) as server:
        with pytest.raises(httpx.ReadTimeout):
            await server.http.post(
                "/v1/completions", json=ROUTES["/v1/completions"], timeout=httpx.Timeout(5, read=0.05)
            )
        async with server.http.stream("POST", "/v1/completions", json=ROUTES["/v1/completions"]) as response:
            assert await anext(response.aiter_text()) == ": waiting\n\n"
        await until(lambda: len(server.engine.aborts) == 2)
        assert server.llm.live_requests == 0
        assert server.llm.metrics.aborted == {"disconnect": 2}

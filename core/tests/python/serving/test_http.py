"""What arrives on a connection: heads that are too large or no HTTP, wishes for other protocols, bodies that do not end."""

from __future__ import annotations

import asyncio
import json

import pytest

from tokenspeed.testing.server import Running, running, until

pytestmark = pytest.mark.anyio


async def raw(server: Running, *pieces: bytes) -> list[tuple[int, dict[str, object]]]:
    """Status and JSON body of every answer on a connection of its own, whose requests end with ``connection: close``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.001)  # so that most pieces are read by themselves; the answers do not depend on it
    left, answers = await asyncio.wait_for(reader.read(), 30), []
    writer.close()
    while left:
        head, _, left = left.partition(b"\r\n\r\n")
        length = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))[15:])
        answers.append((int(head.split()[1]), json.loads(left[:length] or b"{}")))
        left = left[length:]
    return answers


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"z" * 66_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /" + b"z" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /?" + b"z" * 40_000 + b" HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 40_000 + b"\r\n\r\n",
    ],
)
async def test_a_head_that_is_too_large_is_431_wherever_its_bytes_are(head: bytes) -> None:
    async with running() as server:
        ((status, body),) = await raw(server, head)
    assert (status, body["error"]["code"]) == (431, "invalid_http")


async def test_what_is_no_http_is_told_as_json() -> None:
    async with running() as server:
        for head in (b"NO HTTP\r\n\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n"):
            ((status, body),) = await raw(server, head)
            assert (status, body["error"]["code"]) == (400, "invalid_http")
        assert (await server.http.get("/health")).status_code == 200


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_wish_for_another_protocol_is_ignored(size: int, caplog: pytest.LogCaptureFixture) -> None:
    """Clients that ask for HTTP/2 with their first request get an answer to it, bodies of either kind and what follows on the connection included."""
    body = json.dumps({"prompt": "hi"}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + UPGRADE
    sent = (
        post + b"content-length: %d\r\n\r\n" % len(body) + body
        + post + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
        + b"GET /health HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"\r\n"
        + b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: websocket\r\n\r\n"
    )  # fmt: skip
    async with running() as server:
        answers = await raw(server, *(sent[at : at + size] for at in range(0, len(sent), size)))
        assert [request.session for request in server.engine.requests] == [-1, -1]
    assert [status for status, _ in answers] == [200] * 4
    assert answers[0][1]["choices"][0]["text"] == answers[1][1]["choices"][0]["text"] == "hello"
    assert "pgrade" not in caplog.text


async def test_a_server_that_ends_waits_for_no_body() -> None:
    """Not for one that stands still, nor for one that comes in drops; a complete one is read: what runs can still be aborted."""
    async with running() as server:
        writers = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets.port)
            writer.write(
                b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"pro\r\n'
            )
            writers.append((reader, writer))
        await until(lambda: server.context.http_requests == 2)
        server.context.draining = True
        assert (await server.control.post("/abort", json={"rid": "nobody"})).json() == {"aborted": 0}
        assert (await server.complete()).status_code == 503
        head = asyncio.create_task(writers[0][0].readuntil(b"\r\n\r\n"))
        while not head.done():
            writers[0][1].write(b"1\r\nx\r\n")
            await asyncio.sleep(0.02)
        for answer in (await head, await writers[1][0].readuntil(b"\r\n\r\n")):
            assert answer.startswith(b"HTTP/1.1 503")
        await until(lambda: server.context.http_requests == 0)
        for _, writer in writers:
            writer.close()

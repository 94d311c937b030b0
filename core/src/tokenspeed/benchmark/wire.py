"""Incremental decoders of an HTTP/1.1 response and of server-sent events, and one streaming POST built on them.

The client shares the machine with the server it measures, so it does no more than this per token: split lines, note the time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

__all__ = ["ResponseDecoder", "SseDecoder", "Target", "WireError", "exchange"]

_MAX_HEAD = 64 * 1024


class WireError(Exception):
    """The connection failed, timed out, or the peer does not speak HTTP/1.1."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a server listens. ``prefix`` is the path in front of ``/v1``, normally empty."""

    host: str
    port: int
    tls: bool
    prefix: str
    api_key: str

    @classmethod
    def parse(cls, base_url: str, api_key: str = "") -> Target:
        """From ``http://host:port`` with or without ``/v1`` at its end. Raises ``ValueError`` for anything that is not such an address."""
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http address: {base_url!r}")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(
            host=parts.hostname, port=parts.port or (443 if tls else 80), tls=tls, prefix=prefix, api_key=api_key
        )

    def request(self, method: str, path: str, body: bytes) -> bytes:
        """The bytes of one request; the connection closes after it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        auth = f"authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"{method} {self.prefix}{path} HTTP/1.1\r\nhost: {host}:{self.port}\r\n{auth}"
            f"content-type: application/json\r\naccept: text/event-stream, application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


class ResponseDecoder:
    """Feed what arrives, get the body bytes that are ready. Handles chunked bodies, fixed lengths, and bodies that end with the connection."""

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self._buffer = bytearray()
        self._in_head = True
        self._chunked = False
        self._left: int | None = None  # body bytes to come; in a chunked body, of this chunk (its line end included)

    def feed(self, data: bytes) -> bytes:
        """Body bytes completed by ``data``; raises ``WireError`` for a malformed response."""
        self._buffer += data
        if self._in_head and not self._parse_head():
            return b""
        if self._chunked:
            return self._take_chunks()
        out = bytes(self._buffer) if self._left is None else bytes(self._buffer[: self._left])
        self._buffer.clear()
        if self._left is not None:
            self._left -= len(out)
            self.done = self._left == 0
        return out

    def end(self) -> None:
        """The peer closed the connection. Raises ``WireError`` if the response is incomplete."""
        if self._in_head or self._chunked or self._left is not None:
            if not self.done:
                raise WireError("the server closed the connection in the middle of its answer")
        else:
            self.done = True

    def _parse_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD:
                raise WireError("response headers are longer than 64 KiB")
            return False
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        try:
            version, status = lines[0].split(" ", 2)[:2]
            if not version.startswith("HTTP/1."):
                raise ValueError(version)
            self.status = int(status)
        except ValueError:
            raise WireError(f"not an HTTP/1.1 response: {lines[0][:80]!r}") from None
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if not self._chunked and "content-length" in headers:
            self._left = int(headers["content-length"])
            self.done = self._left == 0
        self._in_head = False
        return True

    def _take_chunks(self) -> bytes:
        out = bytearray()
        while not self.done:
            if self._left is None:
                end = self._buffer.find(b"\r\n")
                if end < 0:
                    break
                try:
                    size = int(bytes(self._buffer[:end]).split(b";")[0], 16)
                except ValueError:
                    raise WireError(f"bad chunk size {bytes(self._buffer[:end])[:40]!r}") from None
                del self._buffer[: end + 2]
                if size == 0:
                    self.done = True
                    break
                self._left = size + 2
            take = bytes(self._buffer[: self._left])
            del self._buffer[: len(take)]
            # The last two of the chunk's bytes are its line end, wherever the cut falls.
            out += take[: max(0, min(len(take), self._left - 2))]
            self._left -= len(take)
            if self._left:
                break
            self._left = None
        return bytes(out)


class SseDecoder:
    """Feed body bytes, get the ``data`` of the events that are complete (comments and other fields are skipped)."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data lines completed by ``data``, ``[DONE]`` among them."""
        if not data:
            return []
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class _Exchange(asyncio.Protocol):
    def __init__(
        self, request: bytes, on_body: Callable[[int, bytes, float], None], done: asyncio.Future[None]
    ) -> None:
        self._request = request
        self._on_body = on_body
        self._done = done
        self._decoder = ResponseDecoder()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            body = self._decoder.feed(data)
            if body:
                self._on_body(self._decoder.status, body, now)
        except Exception as error:
            self._finish(error)
            return
        if self._decoder.done:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self._decoder.end()
        except WireError as error:
            self._finish(exc or error)
        else:
            self._finish(exc)

    def _finish(self, error: Exception | None) -> None:
        if not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)
        if self._transport is not None:
            self._transport.close()


async def exchange(
    target: Target, method: str, path: str, body: bytes, on_body: Callable[[int, bytes, float], None], timeout_s: float
) -> None:
    """Send one request and hand every piece of the answer's body to ``on_body(status, data, perf_counter time)`` as it arrives.

    Cancelling the call closes the connection. Raises ``WireError`` (or the ``OSError`` of the connection); ``on_body`` may raise to end the exchange.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    request = target.request(method, path, body)
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(
                lambda: _Exchange(request, on_body, done), target.host, target.port, ssl=True if target.tls else None
            )
            await done
    except TimeoutError:
        raise WireError(f"no complete answer within {timeout_s:g} s") from None
    finally:
        if transport is not None:
            transport.close()

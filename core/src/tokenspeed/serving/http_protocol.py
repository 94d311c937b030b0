"""uvicorn's httptools protocol with bounds on request heads (their size, the number of headers, the time they may take), and without upgrades."""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenspeed.errors import RequestError
from tokenspeed.serving.protocol.answers import error_body
from tokenspeed.serving.sse import to_json

__all__ = ["BoundedHttpProtocol"]

_MAX_HEAD_BYTES = 64 * 1024
_MAX_HEADERS = 200
_HEAD_TIMEOUT_S = 15.0

_REASONS = {
    400: ("Bad Request", "the request is not valid HTTP"),
    408: ("Request Timeout", f"the head of the request did not arrive within {_HEAD_TIMEOUT_S:g} s"),
    431: (
        "Request Header Fields Too Large",
        f"the head of the request is larger than {_MAX_HEAD_BYTES} bytes or {_MAX_HEADERS} headers",
    ),
}


def _answer(status: int) -> bytes:
    reason, message = _REASONS[status]
    body = to_json(error_body(RequestError(message, code="invalid_http", status=status)))
    head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose request head is too large (431), too slow (408) or no HTTP (400).

    Requests to change the protocol (``Upgrade: h2c``, which some clients send with every first request) are served in HTTP/1.1, as RFC 9110, 7.8 has it.
    """

    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _refused = False
    _seen = False
    _upgrade = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._refuse, 408)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._seen = True
        if self._head_timer is not None:  # still in the head: what arrived may hold a header that never ends
            self._head_bytes += len(data)
        self._feed(data)
        if self._head_timer is not None and self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse(431)

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserError:
                self._refuse(400)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._upgrade or self._refused:
                    return
                # The parser takes what follows for another protocol: it gets the head again, without the wish.
                data = self._plain_head() + data[upgrade.args[0] :]
                self._upgrade = False
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _plain_head(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(part for part in value.split(b",") if part.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) >= _MAX_HEAD_BYTES:
            self._refuse(431)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._refuse, 408)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > _MAX_HEADERS:
            self._refuse(431)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > _MAX_HEAD_BYTES:
            self._refuse(431)
        self._upgrade = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        if not self._refused and not self._upgrade:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused and not self._upgrade:
            super().on_message_complete()

    def _stop_timer(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int) -> None:
        if self._refused:
            return
        self._refused = True
        self._stop_timer()
        if not self.transport.is_closing():
            if self._seen:  # a connection that was opened ahead of need is closed without a word
                self.transport.write(_answer(status))
            self.transport.close()

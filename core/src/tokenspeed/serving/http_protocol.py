"""uvicorn's httptools protocol with bounds on request heads: their size, the number of headers, and the time they may take."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedHttpProtocol"]

_MAX_HEAD_BYTES = 64 * 1024
_MAX_HEADERS = 200
_HEAD_TIMEOUT_S = 15.0

_ANSWERS = {
    408: b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    431: b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
}


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose request head is too large (431) or too slow (408)."""

    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _refused = False
    _seen = False

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
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > _MAX_HEAD_BYTES:
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
        if sum(len(name) + len(value) for name, value in self.headers) > _MAX_HEAD_BYTES:
            self._refuse(431)
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
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
                self.transport.write(_ANSWERS[status])
            self.transport.close()

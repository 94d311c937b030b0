"""Answers over server-sent events, and the watch for clients that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from litestar import Response
from litestar.response.base import ASGIResponse
from litestar.types import HTTPResponseStartEvent, Receive, Scope, Send

from tokenspeed.errors import TokenSpeedError
from tokenspeed.serving.body import ClientGone
from tokenspeed.serving.context import HttpRequest
from tokenspeed.serving.generation import Generation
from tokenspeed.serving.protocol.answers import error_body

__all__ = ["DONE", "EventStream", "answer", "event", "stream_answer", "to_json"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
to_json = msgspec.json.Encoder().encode

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that would otherwise collect the stream
]


def event(body: Any) -> bytes:
    """One event with a JSON body."""
    return b"data: " + to_json(body) + b"\n\n"


async def _watch(receive: Receive, generation: Generation) -> None:
    """Ends ``generation`` the moment the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.abort("disconnect")


async def answer(request: HttpRequest, generation: Generation, work: Coroutine[Any, Any, _T]) -> _T:
    """Await ``work``, which reads ``generation``, while watching the connection.

    Raises:
        ClientGone: the client left first; the engine has been told.
    """
    watch = asyncio.create_task(_watch(request.receive, generation))
    try:
        result = await work
    except BaseException:
        generation.abort("disconnect")
        raise
    finally:
        watch.cancel()
    if generation.abort_reason:
        raise ClientGone
    return result


async def stream_answer(
    request: HttpRequest, generation: Generation, events: AsyncGenerator[bytes, None]
) -> EventStream:
    """A stream whose headers go out with its first event, so that a failure before that still has a status of its own.

    Raises:
        ClientGone: the client left before the first event.
        TokenSpeedError: the engine failed before the first event.
    """
    watch = asyncio.create_task(_watch(request.receive, generation))
    try:
        first = await anext(events, None)
    except BaseException:
        watch.cancel()
        generation.abort("disconnect")
        raise
    if first is None:
        watch.cancel()
        raise ClientGone
    return EventStream(generation, first, events, watch)


class EventStream(Response[None]):
    """Sends what ``events`` yields as it comes.

    The connection is watched beside it: a client that leaves ends the generation at once. A failure on the way is told as an event with an ``error``.
    """

    def __init__(
        self, generation: Generation, first: bytes, events: AsyncGenerator[bytes, None], watch: asyncio.Task[None]
    ) -> None:
        super().__init__(None)
        self._generation = generation
        self._first = first
        self._events = events
        self._watch = watch

    def to_asgi_response(self, *_: Any, **__: Any) -> ASGIResponse:
        """The application that sends the stream."""
        return _Sender(self._send)

    async def _send(self, send: Send) -> None:
        start: HTTPResponseStartEvent = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
        try:
            await send(start)
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:  # the headers are out: the error travels as an event
                if not isinstance(error, TokenSpeedError):
                    _log.exception("A stream failed unexpectedly")
                await send({"type": "http.response.body", "body": event(error_body(error)) + DONE, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._watch.cancel()
            self._generation.abort("disconnect")
            await self._events.aclose()


class _Sender(ASGIResponse):
    """Hands the connection's ``send`` to the stream."""

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await self._work(send)

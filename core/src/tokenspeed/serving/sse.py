"""Answers over server-sent events, and the watch for clients that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from litestar import Response
from litestar.response.base import ASGIResponse
from litestar.types import HTTPResponseStartEvent, Receive, Scope, Send

from tokenspeed.errors import TokenSpeedError
from tokenspeed.serving.body import ClientGone
from tokenspeed.serving.context import HttpRequest
from tokenspeed.serving.generation import Delta, Generation
from tokenspeed.serving.protocol.answers import error_body, raise_failed

__all__ = ["DONE", "EventStream", "answer", "event", "event_stream", "stream_answer", "to_json"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
#: Clients skip lines that begin with a colon.
_COMMENT = b": waiting\n\n"
#: How long a stream without an event keeps its headers back, and how long an open one stays silent; common proxies give up after 30 s or more.
_FIRST_WORD_S = 5.0
_KEEP_ALIVE_S = 15.0
to_json = msgspec.json.Encoder().encode

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that would otherwise collect the stream
]


def event(body: Any) -> bytes:
    """One event with a JSON body."""
    return b"data: " + to_json(body) + b"\n\n"


async def event_stream(
    generation: Generation, chunks: Callable[[Delta], Sequence[bytes]], last: Callable[[], bytes]
) -> AsyncGenerator[bytes, None]:
    """The events of a generation, those of one wake-up joined into one write.

    Args:
        chunks: what to tell of a delta; nothing where it is empty.
        last: what to tell when every choice has ended; not asked after an abort.

    Raises:
        RequestError: a choice failed; what came in the same step was told before. EngineError: the engine is gone.
    """
    while (deltas := await generation.next()) is not None:
        out: list[bytes] = []
        for delta in deltas:
            if delta.finish == "error" and out:
                yield b"".join(out)
            raise_failed(delta)
            out += chunks(delta)
        if out:
            yield b"".join(out)
    if not generation.abort_reason:
        yield last()


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
    except BaseException as error:
        generation.abort(_why(error))
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

    An engine refuses with its next step; where nothing is told for ``_FIRST_WORD_S`` the request waits or is in a long prefill, and the headers go out
    ahead.

    Raises:
        ClientGone: the client left meanwhile.
        TokenSpeedError: the engine failed meanwhile.
    """
    watch = asyncio.create_task(_watch(request.receive, generation))
    first = asyncio.ensure_future(anext(events, None))
    try:
        await asyncio.wait((first,), timeout=_FIRST_WORD_S)
        if first.done() and first.result() is None:
            raise ClientGone
    except BaseException as error:
        watch.cancel()
        first.cancel()
        generation.abort(_why(error))
        raise
    return EventStream(generation, first, events, watch)


def _why(error: BaseException) -> str:
    """Why a generation is given up: a cancelled handler has lost its client."""
    return "error" if isinstance(error, Exception) and not isinstance(error, ClientGone) else "disconnect"


class EventStream(Response[None]):
    """Sends what ``events`` yields as it comes.

    The connection is watched beside it: a client that leaves ends the generation at once. A failure on the way is told as an event with an ``error``.
    Silence is filled with comments, so that proxies do not take the connection for dead.
    """

    def __init__(
        self,
        generation: Generation,
        first: asyncio.Future[bytes | None],
        events: AsyncGenerator[bytes, None],
        watch: asyncio.Task[None],
    ) -> None:
        super().__init__(None)
        self._generation = generation
        self._first = first
        self._events = events
        self._watch = watch
        self._sent_s = 0.0

    def to_asgi_response(self, *_: Any, **__: Any) -> ASGIResponse:
        """The application that sends the stream."""
        return _Sender(self._send)

    async def _send(self, send: Send) -> None:
        start: HTTPResponseStartEvent = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
        loop = asyncio.get_running_loop()
        pulse: asyncio.Task[None] | None = None
        reason = "disconnect"

        async def put(data: bytes) -> None:
            self._sent_s = loop.time()
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await send(start)
            if not self._first.done():
                await put(_COMMENT)
            pulse = asyncio.create_task(self._fill(put))
            try:
                first = await self._first
                if first is not None:
                    await put(first)
                async for data in self._events:
                    await put(data)
            except Exception as error:  # the headers are out: the error travels as an event
                reason = "error"
                if not isinstance(error, TokenSpeedError):
                    _log.exception("A stream failed unexpectedly")
                await put(event(error_body(error)) + DONE)
            pulse.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if pulse is not None:
                pulse.cancel()
            self._watch.cancel()
            self._generation.abort(reason)
            self._first.cancel()
            await asyncio.wait((self._first,))  # only then can the generator be closed
            await self._events.aclose()

    async def _fill(self, put: Callable[[bytes], Awaitable[None]]) -> None:
        """A comment whenever nothing was sent for a while."""
        while True:
            rest = self._sent_s + _KEEP_ALIVE_S - asyncio.get_running_loop().time()
            if rest <= 0:
                await put(_COMMENT)
            else:
                await asyncio.sleep(rest)


class _Sender(ASGIResponse):
    """Hands the connection's ``send`` to the stream."""

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await self._work(send)

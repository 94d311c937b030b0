"""Reading request bodies within bounds of size and time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from tokenspeed.errors import RequestError
from tokenspeed.serving.context import HttpRequest, ServerContext, context_of
from tokenspeed.serving.protocol.parse import json_object

__all__ = ["ClientGone", "read_json"]

_BODY_TIMEOUT_S = 60.0
#: How often a body that does not arrive is thought of, and what it gets when the server ends.
_LOOK_S = 0.25
_DISCARD_BYTES = 256 * 1024 * 1024
_DISCARD_S = 2.0


class ClientGone(Exception):  # noqa: N818 (nothing went wrong: there is nobody left to answer)
    """The connection closed before the request was complete."""


async def read_json(request: HttpRequest, *, empty_is: dict[str, Any] | None = None) -> tuple[dict[str, Any], int]:
    """The body as a JSON object, and its size in bytes. ``empty_is`` stands for a missing body.

    Raises:
        RequestError: 413 past ``max_body_bytes`` (declared or sent), 408 when it takes too long, 503 when the server ends meanwhile, 415 for a compressed one,
            400 for what is no JSON object.
        ClientGone: the client left.
    """
    body = await _read(request, context_of(request).config.max_body_bytes)
    if not body and empty_is is not None:
        return empty_is, 0
    return json_object(body), len(body)


async def _read(request: HttpRequest, limit: int) -> bytes:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise RequestError(
            f"content-encoding {encoding[:40]!r} is not taken; send the body as it is",
            code="unsupported_encoding",
            status=415,
        )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        await _discard(request)
        raise _too_large(limit)
    context, body = context_of(request), bytearray()
    end = time.monotonic() + _BODY_TIMEOUT_S
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                message = await request.receive()
                if message["type"] != "http.request":
                    raise ClientGone
                body += message["body"]
                if not message["more_body"] and len(body) <= limit:
                    return bytes(body)
        if len(body) > limit:
            await _discard(request)
            raise _too_large(limit)
        now = time.monotonic()
        if context.draining:  # a client that does not send on would keep the server from its end
            end = min(end, now + _LOOK_S)
        if now >= end:
            raise _too_slow(context)


def _too_slow(context: ServerContext) -> RequestError:
    if context.draining:
        return RequestError("the server is shutting down; try again later", code="unavailable", status=503)
    return RequestError(f"the body did not arrive within {_BODY_TIMEOUT_S:g} s", code="timeout", status=408)


async def _discard(request: HttpRequest) -> None:
    """Read on for a moment without keeping anything: a client that is still sending would see a reset instead of the answer."""
    left = _DISCARD_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while left > 0:
                message = await request.receive()
                if message["type"] != "http.request" or not message["more_body"]:
                    return
                left -= len(message["body"])


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body is larger than {limit} bytes", code="body_too_large", status=413)

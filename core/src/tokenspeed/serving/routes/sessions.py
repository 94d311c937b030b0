"""``POST /v1/sessions/{id}/prefetch`` and ``DELETE /v1/sessions/{id}``: what a client says of a session between its turns."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import delete, post
from msgspec import Meta

from tokenspeed.errors import RequestError
from tokenspeed.serving.body import read_json
from tokenspeed.serving.context import HttpRequest, check_header, context_of
from tokenspeed.serving.protocol.parse import parse_object
from tokenspeed.serving.protocol.sessions import check_session_id, session_number

__all__ = ["SessionBody", "prefetch_session", "release_session"]


class SessionBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body, which may be left out. ``cache_salt`` is that of the session's requests; the header ``X-Cache-Salt`` says the same."""

    cache_salt: Annotated[str, Meta(max_length=256)] | None = None


@post("/v1/sessions/{session_id:str}/prefetch", status_code=200)
async def prefetch_session(request: HttpRequest) -> dict[str, Any]:
    """Begin to bring the pages of a session's last turn back to the device; how many are on their way."""
    return await _ask(request, "prefetch_session")


@delete("/v1/sessions/{session_id:str}", status_code=200)
async def release_session(request: HttpRequest) -> dict[str, Any]:
    """Keep the pages of a session no longer; how many were kept."""
    return await _ask(request, "release_session")


async def _ask(request: HttpRequest, method: str) -> dict[str, Any]:
    context = context_of(request)
    reason = context.unavailable()
    if reason:
        raise RequestError(f"{reason}; try again later", code="unavailable", status=503)
    session_id = str(request.path_params["session_id"])
    check_session_id(session_id)
    value, _ = await read_json(request, empty_is={})
    check_header(request, "X-Cache-Salt")
    body, header = parse_object(value, SessionBody, {}), request.headers.get("x-cache-salt")
    salt = (body.cache_salt or "").encode()
    if header is not None:
        given = header.encode("latin-1")  # the bytes that were sent
        if body.cache_salt is not None and given != salt:
            raise RequestError(
                "cache_salt and the header X-Cache-Salt contradict each other; give one", param="cache_salt"
            )
        salt = given
    reply = await context.llm.client.control(method, session=session_number(session_id, salt))
    if not reply.ok:
        raise RequestError(
            f"the session {session_id!r} is not known: nothing was kept for it with this cache_salt, or its time is over",
            param="session_id",
            code="session_not_found",
            status=404,
        )
    return {"session_id": session_id, "pages": reply.result}

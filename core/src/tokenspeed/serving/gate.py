"""What stands before every route of both ports: the API key, and the count of answers."""

from __future__ import annotations

import hmac

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from tokenspeed.errors import RequestError
from tokenspeed.serving.context import ServerContext
from tokenspeed.serving.protocol.answers import error_body
from tokenspeed.serving.sse import to_json

__all__ = ["Gate"]

#: Asked by machines, around the clock, and red by design while a server starts and ends: among the other answers they would be errors that no user met.
_PROBES = frozenset({"/health", "/metrics"})


class Gate:
    """ASGI wrapper. With ``--api-key`` set every route needs ``Authorization: Bearer KEY``, ``/health`` and ``/metrics`` too; probes must send it."""

    def __init__(self, app: ASGIApp, context: ServerContext, paths: frozenset[str]) -> None:
        self._app = app
        self._paths = paths | _PROBES
        self._context = context
        self._keys = tuple(key.encode() for key in context.config.api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        context = self._context
        context.http_requests += 1
        metrics = context.llm.metrics
        path = scope["path"].rstrip("/") or "/"  # as the router takes it
        responses = metrics.probes if path in _PROBES else metrics.responses
        path = path if path in self._paths else "other"  # a label of the metrics: only known values

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                responses[(path, message["status"])] += 1
            await send(message)

        try:
            if self._keys and not self._authorised(scope):
                await _refuse(counted)
            else:
                await self._app(scope, receive, counted)
        finally:
            context.http_requests -= 1

    def _authorised(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        # every key is compared in full, whether an earlier one matched or not
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


async def _refuse(send: Send) -> None:
    error = RequestError(
        "the API key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key", status=401
    )
    body = to_json(error_body(error))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"www-authenticate", b"Bearer"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})

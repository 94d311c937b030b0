"""The two Litestar applications: the API, and the control routes on their own port."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from litestar import Litestar, Response
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, ControllerRouterHandler

from tokenspeed.errors import RequestError, TokenSpeedError
from tokenspeed.serving.body import ClientGone
from tokenspeed.serving.context import HttpRequest, ServerContext
from tokenspeed.serving.gate import Gate
from tokenspeed.serving.protocol.answers import error_body, error_status
from tokenspeed.serving.routes import (
    chat,
    completions,
    control,
    generate,
    health,
    metrics,
    models,
    openapi,
    sessions,
    tokens,
    version,
)

__all__ = ["build_app", "build_control_app"]

_log = logging.getLogger(__name__)


def build_app(context: ServerContext) -> ASGIApp:
    """The API: OpenAI-compatible and native routes, health, metrics."""
    return _build(
        context,
        [
            chat.chat_completions,
            completions.completions,
            models.list_models,
            models.show_model,
            generate.generate,
            sessions.prefetch_session,
            sessions.release_session,
            tokens.tokenize,
            tokens.detokenize,
            health.health,
            health.health_head,
            metrics.metrics,
            version.version_route,
            openapi.openapi_document,
        ],
    )


def build_control_app(context: ServerContext) -> ASGIApp:
    """Routes that look into and act on the whole server."""
    return _build(
        context,
        [
            control.get_server_info,
            control.get_model_info,
            control.abort,
            control.flush_cache,
            control.plugins,
            health.health,
            health.health_head,
            version.version_route,
        ],
    )


def _build(context: ServerContext, handlers: Sequence[ControllerRouterHandler]) -> ASGIApp:
    app = Litestar(
        route_handlers=handlers,
        state=State({"context": context}),
        openapi_config=None,
        exception_handlers={
            Exception: _unexpected,
            HTTPException: _http_error,
            TokenSpeedError: _known_error,
            ClientGone: _gone,
        },
        logging_config=None,
        request_max_body_size=None,  # body.read_json keeps the limit
    )
    return Gate(app, context, frozenset(route.path for route in app.routes))


def _answer(body: dict[str, Any], status: int, headers: dict[str, str] | None = None) -> Response[dict[str, Any]]:
    extra = dict(headers or {})
    if status == 503:
        extra["retry-after"] = "1"
    if status in (408, 413, 415):
        extra["connection"] = "close"  # the rest of the body is not worth reading
    return Response(body, status_code=status, media_type="application/json", headers=extra)


def _known_error(_: HttpRequest, error: TokenSpeedError) -> Response[dict[str, Any]]:
    return _answer(error_body(error), error_status(error))


def _http_error(_: HttpRequest, error: HTTPException) -> Response[dict[str, Any]]:
    """What Litestar refuses by itself: unknown paths, wrong methods."""
    status = error.status_code
    if status >= 500:
        _log.error("Request failed: %s", error, exc_info=error)
    shown = RequestError(error.detail or "refused", status=status)
    return _answer(error_body(shown), status, dict(error.headers or {}))


def _unexpected(_: HttpRequest, error: Exception) -> Response[dict[str, Any]]:
    _log.error("Request failed unexpectedly", exc_info=error)
    return _answer(error_body(error), 500)


def _gone(_: HttpRequest, error: Exception) -> Response[dict[str, Any]]:  # noqa: ARG001
    """Nobody reads this; 499 is what logs call it."""
    return _answer({}, 499)

"""``GET /health``: 200 while requests are taken and the engine answers, else 503 with the reason."""

from __future__ import annotations

from typing import Any

from litestar import Response, get, head

from tokenspeed.serving.context import HttpRequest, context_of

__all__ = ["health", "health_head"]


@get("/health")
async def health(request: HttpRequest) -> Response[dict[str, Any]]:
    """Starting, draining, a dead engine and one that hangs are all unhealthy."""
    reason = context_of(request).unavailable()
    if reason:
        return Response({"status": "unavailable", "reason": reason}, status_code=503, headers={"retry-after": "1"})
    return Response({"status": "ok"})


@head("/health")
async def health_head(request: HttpRequest) -> Response[None]:
    """The same without a body, as some load balancers probe."""
    if context_of(request).unavailable():
        return Response(None, status_code=503, headers={"retry-after": "1"})
    return Response(None)

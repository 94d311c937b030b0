"""``GET /metrics``: Prometheus text."""

from __future__ import annotations

from litestar import Response, get

from tokenspeed.serving.context import HttpRequest, context_of
from tokenspeed.serving.metrics import render_metrics

__all__ = ["metrics"]


@get("/metrics")
async def metrics(request: HttpRequest) -> Response[bytes]:
    """Always on; answers in every state of the server."""
    llm = context_of(request).llm
    return Response(
        render_metrics(llm.metrics, llm.client), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"}
    )

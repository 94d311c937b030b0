"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from litestar import get

from tokenspeed.serving.context import HttpRequest, ServerContext, context_of

__all__ = ["list_models", "show_model"]


@get("/v1/models")
async def list_models(request: HttpRequest) -> dict[str, Any]:
    """The served names. 503 while the model loads: how long a request may be is not known before."""
    context = context_of(request)
    return {"object": "list", "data": [_card(context, name) for name in context.model_names]}


@get("/v1/models/{model_id:path}")
async def show_model(request: HttpRequest) -> dict[str, Any]:
    """One served name; names may contain slashes."""
    context = context_of(request)
    path = str(request.path_params["model_id"])
    name = path if path in context.model_names else path.removeprefix("/")  # Litestar's path begins with a slash
    context.check_model(name)
    return _card(context, name)


def _card(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.started_s,
        "owned_by": "tokenspeed",
        "root": context.model_names[0],
        "parent": None,
        "max_model_len": context.llm.info.max_model_len,
    }

"""Control routes, on a port of their own: ``/get_server_info``, ``/get_model_info``, ``/abort``, ``/flush_cache``, ``/plugins``."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from litestar import Response, get, post

from tokenspeed import __version__
from tokenspeed.errors import EngineError, RequestError
from tokenspeed.messages import EngineStats, as_named
from tokenspeed.serving.body import read_json
from tokenspeed.serving.context import HttpRequest, context_of
from tokenspeed.serving.protocol.parse import parse_object

__all__ = ["AbortBody", "abort", "flush_cache", "get_model_info", "get_server_info", "plugins"]


#: How long ``/get_server_info`` waits for the first figures of an engine that has told none.
_STATS_S = 2.0


class AbortBody(msgspec.Struct, kw_only=True, frozen=True):
    """``rid``: the id of an answer (``chatcmpl-...``), or what its client gave as ``X-Request-Id``; ``abort_all``: every request."""

    rid: str | None = None
    abort_all: bool = False


@get("/get_server_info")
async def get_server_info(request: HttpRequest) -> dict[str, Any]:
    """Effective settings, the engine's description and its current statistics."""
    context = context_of(request)
    client = context.llm.client
    if (
        client.stats is None and client.ready and not client.hung
    ):  # the engine tells them as they change, and nothing has happened yet
        with contextlib.suppress(EngineError):
            await client.control("stats", _STATS_S)
    info = {} if client.info is None else as_named(client.info)
    info.pop("plan", None)
    return {
        "version": __version__,
        "status": context.unavailable() or "ready",
        "model_names": list(context.model_names),
        **context.server_info,
        "engine": info,
        "stats": {} if client.stats is None else _stats(client.stats),
    }


def _stats(stats: EngineStats) -> dict[str, Any]:
    shown: dict[str, Any] = as_named(stats)
    if stats.tiers is not None:
        loads, saves = stats.tiers.store_up
        shown["tiers"]["store_up"] = {"loads": loads, "saves": saves}
    return shown


@get("/get_model_info")
async def get_model_info(request: HttpRequest) -> dict[str, Any]:
    """What is served."""
    context = context_of(request)
    info = context.llm.info
    return {
        "model_path": context.server_info.get("model_path", context.model_names[0]),
        "model_names": list(context.model_names),
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "dtype": info.dtype,
        "is_generation": True,
    }


@post("/abort", status_code=200)
async def abort(request: HttpRequest) -> dict[str, int]:
    """End requests by the id of their answer, or all; their clients get finish reason ``abort``."""
    value, _ = await read_json(request)
    body = parse_object(value, AbortBody, {})
    if (body.rid is None) != body.abort_all:
        raise RequestError("give either rid or abort_all", param="rid")
    return {"aborted": context_of(request).llm.abort_requests(body.rid, "api")}


@post("/flush_cache", status_code=200)
async def flush_cache(request: HttpRequest) -> Response[dict[str, Any]]:
    """Forget every cached prefix that no running request uses."""
    client = context_of(request).llm.client
    if client.hung or not client.ready:  # the answer would not come; a server that drains still asks
        raise RequestError(f"{context_of(request).unavailable()}; try again later", code="unavailable", status=503)
    reply = await client.control("flush_cache")
    return Response({"flushed": reply.ok, "result": reply.result}, status_code=200 if reply.ok else 409)


@get("/plugins")
async def plugins(request: HttpRequest) -> dict[str, Any]:
    """The plugin plan that every process verified: plugins, versions, choices and why others lost; once the engine runs, its captured graphs or why it has
    none."""
    context = context_of(request)
    info = context.llm.client.info
    told = context.plugins or context.llm.info.plan
    return told if info is None or not info.graphs else {**told, "graphs": info.graphs}

"""``GET /openapi.json``: the API described from the structs that requests are checked against."""

from __future__ import annotations

from functools import cache
from typing import Any

from litestar import get

from tokenspeed import __version__
from tokenspeed.serving.protocol.chat import ChatRequest, Function, Message, TextPart, ToolCall
from tokenspeed.serving.protocol.completions import CompletionRequest
from tokenspeed.serving.protocol.parse import struct_schema
from tokenspeed.serving.routes.generate import GenerateBody, GenerateSampling
from tokenspeed.serving.routes.sessions import SessionBody
from tokenspeed.serving.routes.tokens import DetokenizeRequest, TokenizeRequest

__all__ = ["openapi_document"]

_POSTS: dict[str, tuple[type, str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation; streamed as server-sent events with stream."),
    "/v1/completions": (CompletionRequest, "Continue a text or token ids."),
    "/generate": (GenerateBody, "Native generation from a text or token ids."),
    "/tokenize": (TokenizeRequest, "Token ids of a text or of a rendered conversation."),
    "/detokenize": (DetokenizeRequest, "Text of token ids."),
}
_GETS = {
    "/v1/models": "The served models.",
    "/health": "200 while requests are taken, else 503 with the reason.",
    "/version": "The server's version.",
}
_ERRORS = {
    "400": "A field is wrong, unsupported or unknown; param names it.",
    "401": "The API key is missing or wrong.",
    "404": "The model is not served here, or the session is not known.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "500": "The request failed.",
    "503": "Starting, draining, overloaded, or without an engine.",
}


@get("/openapi.json")
async def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    return _document()


@cache
def _document() -> dict[str, Any]:
    kinds = (*(kind for kind, _ in _POSTS.values()), GenerateSampling, Message, TextPart, ToolCall, Function)
    refs, components = struct_schema(kinds)
    for kind in kinds:
        components[kind.__name__]["additionalProperties"] = False  # unknown fields are refused
    _detail(components)
    by_path = dict(zip(_POSTS, refs, strict=False))
    paths: dict[str, Any] = {path: {"post": _post(by_path[path], text)} for path, (_, text) in _POSTS.items()}
    paths |= {
        path: {"get": {"summary": text, "responses": {"200": _json_response(text), **_errors("401", "503")}}}
        for path, text in _GETS.items()
    }
    paths["/metrics"] = {
        "get": {
            "summary": "Prometheus text.",
            "responses": {"200": {"description": "Metrics.", "content": {"text/plain": {}}}, **_errors("401")},
        }
    }
    paths["/v1/models/{model_id}"] = {
        "get": {
            "summary": "One served model.",
            "parameters": [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}],
            "responses": {"200": _json_response("The model."), **_errors("401", "404")},
        }
    }
    (sessions,), more = struct_schema((SessionBody,))
    components |= more
    components["SessionBody"]["additionalProperties"] = False
    paths |= _session_paths(sessions)
    components["Error"] = _error_schema()
    return {
        "openapi": "3.1.0",
        "info": {"title": "TokenSpeed", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _detail(components: dict[str, Any]) -> None:
    """Fields that are checked in steps are plain objects in the structs; the document says what they hold. ``null`` means "not given" everywhere."""
    chat = components["ChatRequest"]["properties"]
    chat["messages"] = {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Message"}}
    chat["tools"]["items"] = {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": {"$ref": "#/components/schemas/Function"}},
        "additionalProperties": False,
    }
    chat["tool_choice"] = {"enum": ["auto", "none", None]}
    parts = {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}}
    message = components["Message"]["properties"]
    message["role"] = {"enum": ["system", "developer", "user", "assistant", "tool"]}
    message["content"] = {"anyOf": [{"type": "string"}, parts, {"type": "null"}]}
    options = {"type": "boolean"}
    for name in ("ChatRequest", "CompletionRequest"):
        components[name]["properties"]["stream_options"] = {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"include_usage": options, "continuous_usage_stats": options},
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        }
    for component in components.values():
        for schema in component.get("properties", {}).values():
            schema.pop("default", None) if schema.get("default", 0) is None else None


def _post(ref: dict[str, Any], text: str) -> dict[str, Any]:
    return {
        "summary": text,
        "requestBody": {"required": True, "content": {"application/json": {"schema": ref}}},
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {}, "text/event-stream": {}}},
            **_errors(*_ERRORS),
        },
    }


def _session_paths(body: dict[str, Any]) -> dict[str, Any]:
    where = {"name": "session_id", "in": "path", "required": True, "schema": {"type": "string", "maxLength": 128}}
    salt = {"name": "X-Cache-Salt", "in": "header", "schema": {"type": "string", "maxLength": 256}}

    def operation(summary: str) -> dict[str, Any]:
        return {
            "summary": summary,
            "parameters": [where, salt],
            "responses": {"200": _json_response("session_id, and pages."), **_errors(*_ERRORS)},
        }

    prefetch = operation("Bring a session's pages back to the device before its next turn.")
    prefetch["requestBody"] = {"required": False, "content": {"application/json": {"schema": body}}}
    return {
        "/v1/sessions/{session_id}/prefetch": {"post": prefetch},
        "/v1/sessions/{session_id}": {"delete": operation("Keep a session's pages no longer.")},
    }


def _json_response(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}


def _errors(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _ERRORS[status], "content": content} for status in statuses}


def _error_schema() -> dict[str, Any]:
    nullable = {"type": ["string", "null"]}
    error = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": nullable, "code": nullable},
    }
    return {"type": "object", "required": ["error"], "properties": {"error": error}}

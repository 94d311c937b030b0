"""``tool_choice``: whether the model may call tools, must, and which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from tokenspeed.errors import RequestError
from tokenspeed.serving.protocol.parse import parse_object

__all__ = ["ToolChoice", "tool_choice_of"]


class ToolChoice(NamedTuple):
    """A checked choice.

    Attributes:
        active: calls are looked for at all.
        required: the answer is at least one call.
        names: the only functions that may be called; ``None``: all.
        named: one function was asked for by name.
    """

    active: bool
    required: bool = False
    names: tuple[str, ...] | None = None
    named: bool = False


class _Function(msgspec.Struct, kw_only=True, frozen=True):
    name: Annotated[str, Meta(min_length=1)]


class _Named(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["function"]
    function: dict[str, Any]


class _Allowed(msgspec.Struct, kw_only=True, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class _AllowedChoice(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["allowed_tools"]
    allowed_tools: dict[str, Any]


def tool_choice_of(value: str | dict[str, Any] | None, names: Sequence[str]) -> ToolChoice:
    """The choice of a request whose tools are called ``names``.

    Raises:
        RequestError: it is none that is known, or asks for a function that the request does not declare.
    """
    if isinstance(value, dict):
        return _object(value, names)
    if value not in (None, "none", "auto", "required"):
        raise RequestError(
            f"tool_choice: must be none, auto, required, or an object that names a function, got {value[:40]!r}",
            param="tool_choice",
        )
    if value == "required" and not names:
        raise RequestError("tool_choice: required needs tools to call", param="tool_choice")
    return ToolChoice(bool(names) and value != "none", required=value == "required")


def _object(value: dict[str, Any], names: Sequence[str]) -> ToolChoice:
    if value.get("type") == "allowed_tools":
        choice = parse_object(value, _AllowedChoice, {}, "tool_choice.")
        allowed = parse_object(choice.allowed_tools, _Allowed, {}, "tool_choice.allowed_tools.")
        wanted = tuple(
            _name(entry, names, f"tool_choice.allowed_tools.tools[{at}].") for at, entry in enumerate(allowed.tools)
        )
        if not wanted:
            raise RequestError("tool_choice.allowed_tools.tools: needs at least one tool", param="tool_choice")
        return ToolChoice(True, required=allowed.mode == "required", names=wanted)
    return ToolChoice(True, required=True, names=(_name(value, names, "tool_choice."),), named=True)


def _name(value: dict[str, Any], names: Sequence[str], prefix: str) -> str:
    function = parse_object(parse_object(value, _Named, {}, prefix).function, _Function, {}, f"{prefix}function.")
    if function.name not in names:
        known = ", ".join(names[:20]) or "none"
        raise RequestError(
            f"{prefix}function.name: {function.name[:100]!r} is not among the request's tools ({known})",
            param="tool_choice",
        )
    return function.name

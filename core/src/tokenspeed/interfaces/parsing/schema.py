"""Values of arguments that a format writes as plain text: their JSON form, from the type that the tool's schema gives, never from the look of the text.

A text becomes a number, a truth value, null, an array or an object only where the schema allows that type and the text is exactly one; otherwise it
stays a string, also where the schema allows none (the model was wrong, and the client sees what it wrote). Of several types that fit, the narrowest
wins. Numbers are copied digit by digit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parsing.json_stream import JsonStream, Progress, quote

__all__ = ["ANY", "STRING", "ToolSchemas", "to_json"]

Types = frozenset[str]

STRING: Types = frozenset({"string"})
#: A parameter that is declared without a type: whatever JSON the text is, else a string.
ANY: Types = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.0+)?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_REFERENCES = 32


def to_json(text: str, types: Types) -> str:
    """The JSON form of an argument written as ``text``."""
    word = text.strip()
    if types == STRING:
        return quote(text)
    if "null" in types and word == "null":
        return word
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower()
    if "integer" in types and _INTEGER.fullmatch(word):
        return word
    if "number" in types and _NUMBER.fullmatch(word):
        return word
    if ("object" in types and word.startswith("{")) or ("array" in types and word.startswith("[")):
        stream = JsonStream()
        copied, end = stream.feed(word)
        if stream.progress is Progress.DONE and end == len(word):
            return copied
    return quote(text)


class ToolSchemas:
    """The parameter types of a request's tools.

    Args:
        tools: the request's ``tools``: ``{"type": "function", "function": {"name": .., "parameters": ..}}``, or the inner object alone.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                parameters = function.get("parameters")
                self._parameters.setdefault(function["name"], parameters if isinstance(parameters, Mapping) else {})

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def types(self, tool: str, parameter: str) -> Types:
        """The JSON types that ``parameter`` may have. An undeclared parameter, or one of an undeclared tool, is a string."""
        root = self._parameters.get(tool)
        if root is None:
            return STRING
        types = _parameter_types(root, root, parameter, _Budget())
        return STRING if types is None else types


class _Budget:
    """Bounds the work on one schema: references may form cycles."""

    def __init__(self) -> None:
        self.left = _MAX_REFERENCES

    def spend(self) -> bool:
        self.left -= 1
        return self.left >= 0


def _resolve(schema: object, root: Mapping[str, Any], budget: _Budget) -> object:
    """Follow local ``$ref`` pointers."""
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and budget.spend():
        pointer = schema["$ref"]
        if not pointer.startswith("#"):
            return {}
        target: object = root
        for part in pointer[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, Mapping) else None
        schema = target if target is not None else {}
    return schema


def _parameter_types(schema: object, root: Mapping[str, Any], parameter: str, budget: _Budget) -> Types | None:
    """Types of a property of an object schema, also where it is declared in a branch of a combination; ``None`` if nowhere."""
    schema = _resolve(schema, root, budget)
    if not isinstance(schema, Mapping) or not budget.spend():
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and parameter in properties:
        return _types(properties[parameter], root, budget)
    found: Types | None = None
    for keyword in ("allOf", "anyOf", "oneOf"):
        branches = schema.get(keyword)
        for branch in branches if isinstance(branches, list) else ():
            types = _parameter_types(branch, root, parameter, budget)
            found = types if found is None else found | (types or frozenset())
    if found is None and isinstance(schema.get("additionalProperties"), Mapping):
        return _types(schema["additionalProperties"], root, budget)
    return found


def _types(schema: object, root: Mapping[str, Any], budget: _Budget) -> Types:
    """The JSON types that ``schema`` allows."""
    schema = _resolve(schema, root, budget)
    if not isinstance(schema, Mapping) or not budget.spend():
        return ANY
    types = _stated_types(schema)
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and branches:
            types &= frozenset().union(*(_types(branch, root, budget) for branch in branches))
    for branch in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        types &= _types(branch, root, budget)
    return types | {"null"} if schema.get("nullable") is True else types


def _stated_types(schema: Mapping[str, Any]) -> Types:
    """What ``type`` says, or else what the other keywords imply."""
    stated = schema.get("type")
    names = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
    types = frozenset(name for name in names if isinstance(name, str)) & ANY
    if types:
        return types | {"integer"} if "number" in types else types
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return frozenset(_type_of(member) for member in schema["enum"])
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else ANY


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"

"""JSON Schema's keywords: which are read, which only describe, which are refused; and one schema object in the words of draft 2020-12."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tokenspeed_plugin_grammar_xgrammar.limits import (
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_COUNT,
    MAX_DEPTH,
    MAX_PROPERTIES,
    refuse,
)

__all__ = ["ANNOTATIONS", "READ", "REFUSED", "TYPES", "child", "modern"]

TYPES = ("null", "boolean", "object", "array", "string", "integer", "number")

#: Keywords that say nothing about which values are valid. Those that begin with ``x-`` count as well.
ANNOTATIONS = frozenset(
    [
        "$comment",
        "$schema",
        "$vocabulary",
        "$anchor",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "externalDocs",
        "xml",
    ]
)

#: Keywords that XGrammar does not enforce and that have no equivalent in those that it does; each with what to do instead.
REFUSED = {
    "not": "list what is allowed instead",
    "if": "write the cases as anyOf",
    "contains": "describe the items instead",
    "dependentSchemas": "write the cases as anyOf",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "contentMediaType": "describe it to the model instead",
    "contentSchema": "describe it to the model instead",
}

#: Keywords that are read; ``dependentRequired``, ``uniqueItems`` and the unevaluated ones only where they are fulfilled anyway.
READ = frozenset(
    [
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "type",
        "enum",
        "const",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "contentEncoding",
        "prefixItems",
        "items",
        "additionalItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "minContains",
        "maxContains",
        "unevaluatedItems",
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "dependentRequired",
        "dependencies",
        "unevaluatedProperties",
        "then",
        "else",
        "$id",
        "id",
        "$dynamicAnchor",
        "$recursiveAnchor",
    ]
)

_PLAIN_NAME = re.compile(r"\$?[A-Za-z_][\w-]*")


def child(path: str, *steps: str | int) -> str:
    """The path of what lies below ``path``."""
    for step in steps:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if _PLAIN_NAME.fullmatch(step) else f"[{step!r}]"
    return path


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | dict)


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max  # compared exactly, whatever its size
    return isinstance(value, float) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value == int(value) and value >= 0


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _schema_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


_NUMBER = (_is_number, "a finite number that a double holds")
_COUNT = (_is_count, "a whole number, 0 or more, that a double holds")
_SCHEMA = (_is_schema, "a schema: an object, true or false")
_SCHEMAS = (_schemas, "a list of schemas, not empty")
_MAP = (_schema_map, "an object whose values are schemas")
_TEXT = (lambda value: isinstance(value, str), "a string")

_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (
        lambda value: (
            value in TYPES if isinstance(value, str) else _is_names(value) and bool(value) and set(value) <= set(TYPES)
        ),
        f"of {', '.join(TYPES)}, or a list of them",
    ),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list, not empty"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0 that a double holds"),
    "required": (_is_names, "a list of names"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_is_names, value.values())),
        "an object whose values are lists of names",
    ),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(
        (
            "minLength",
            "maxLength",
            "minItems",
            "maxItems",
            "minProperties",
            "maxProperties",
            "minContains",
            "maxContains",
        ),
        _COUNT,
    ),
    **dict.fromkeys(("pattern", "format", "contentEncoding", "$ref"), _TEXT),
    **dict.fromkeys(
        (
            "items",
            "additionalProperties",
            "propertyNames",
            "unevaluatedItems",
            "unevaluatedProperties",
            "if",
            "then",
            "else",
            "not",
            "contains",
        ),
        _SCHEMA,
    ),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), _MAP),
}


def _modern_words(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """``schema`` without annotations, older drafts' forms replaced."""
    out = {key: value for key, value in schema.items() if key not in ANNOTATIONS and not key.startswith("x-")}
    if isinstance(out.get("items"), list):
        if "prefixItems" in out:
            raise refuse(
                child(path, "items"), "a list of schemas beside prefixItems; write one schema for the remaining items"
            )
        out["prefixItems"] = out.pop("items")
        if "additionalItems" in out:
            out["items"] = out["additionalItems"]
        if out["prefixItems"] == []:
            del out["prefixItems"]
    out.pop("additionalItems", None)  # says nothing without a list of items
    for side in ("minimum", "maximum"):
        exclusive = f"exclusive{side.capitalize()}"
        if isinstance(out.get(exclusive), bool) and out.pop(exclusive) and side in out:
            out[exclusive] = out.pop(side)
    if "dependencies" in out:
        dependencies = out.pop("dependencies")
        if not isinstance(dependencies, dict):
            raise refuse(child(path, "dependencies"), "must be an object")
        for name, wanted in dependencies.items():
            kind = "dependentRequired" if isinstance(wanted, list) else "dependentSchemas"
            out[kind] = {**out.get(kind, {}), name: wanted}
    return out


def modern(schema: Mapping[str, Any], path: str, *, root: bool) -> dict[str, Any]:
    """The keywords of one schema object that say which values are valid, each of the right shape.

    Raises:
        GrammarError: a keyword is unknown or malformed.
    """
    out = _modern_words(schema, path)
    for key in ("$id", "id"):
        if key in out and not root:
            raise refuse(
                child(path, key), "identifiers inside a schema cannot be enforced; use $ref with a path from the root"
            )
        out.pop(key, None)
    for key in ("$dynamicAnchor", "$recursiveAnchor"):
        out.pop(key, None)  # say nothing without the references that are refused
    if "if" not in out or not {"then", "else"} & out.keys():
        for key in ("if", "then", "else"):
            out.pop(key, None)
    if out.get("minContains") == 0 and "maxContains" not in out:
        out.pop("contains", None)
    if "contains" not in out:
        for key in ("minContains", "maxContains"):
            out.pop(key, None)
    for key, value in out.items():
        if key not in READ and key not in REFUSED:
            raise refuse(
                child(path, key),
                "is not a keyword of JSON Schema that is known here, so that it could not be enforced; remove it",
            )
        if key in _SHAPES and not _SHAPES[key][0](value):
            raise refuse(child(path, key), f"must be {_SHAPES[key][1]}")
    _check_sizes(out, path)
    return out


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects in ``value`` are nested more than ``levels`` deep."""
    layer = [value]
    for _ in range(levels + 1):
        containers = [item for item in layer if isinstance(item, list | dict)]
        if not containers:
            return False
        layer = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
    return True


def _check_sizes(schema: Mapping[str, Any], path: str) -> None:
    if len(schema.get("properties", ())) > MAX_PROPERTIES:
        raise refuse(
            child(path, "properties"),
            f"{len(schema['properties'])} properties of one object; {MAX_PROPERTIES} are allowed",
        )
    for key in ("enum", "const"):
        if key in schema and _deeper(schema[key], MAX_DEPTH + (key == "enum")):
            raise refuse(child(path, key), f"values nested more than {MAX_DEPTH} deep")
    if "enum" in schema:
        if len(schema["enum"]) > MAX_CHOICES:
            raise refuse(child(path, "enum"), f"{len(schema['enum'])} values; {MAX_CHOICES} are allowed")
        if (chars := sum(len(str(value)) for value in schema["enum"])) > MAX_CHOICE_CHARS:
            raise refuse(child(path, "enum"), f"values of {chars} characters; {MAX_CHOICE_CHARS} are allowed")
    if len(str(schema.get("const", ""))) > MAX_CHOICE_CHARS:
        raise refuse(child(path, "const"), f"more than {MAX_CHOICE_CHARS} characters")
    for key in ("minLength", "maxLength", "minItems", "maxItems"):
        if schema.get(key, 0) > MAX_COUNT:
            raise refuse(child(path, key), f"{schema[key]} is more than the {MAX_COUNT} that can be counted")

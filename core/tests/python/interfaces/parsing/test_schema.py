"""Types come from the schema: combinations, references and missing declarations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenspeed.interfaces.parsing import ToolSchemas, to_json


def convert(schema: Any, text: str, **root: Any) -> Any:
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {"p": schema}, **root}},
        }
    ]
    return json.loads(to_json(text, ToolSchemas(tools).types("f", "p")))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, " 5\n", 5),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "007", "007"),
        ({"type": "number"}, "1e5", 1e5),
        ({"type": "number"}, "Infinity", "Infinity"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "object"}, '{"a": 1', '{"a": 1'),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "005", "005"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "integer"}, {"type": "array"}]}, "[]", []),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, "5", 5),
        ({"$ref": "#/$defs/n"}, "5", 5),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": True}, "true", True),
        ({"properties": {}}, "{}", {}),
        ({"items": {}}, "[]", []),
        ({}, "5", 5),
        ({"description": "anything"}, "text", "text"),
        (True, "5", 5),
        ({"type": "date"}, "text", "text"),
    ],
)
def test_conversion(schema: Any, text: str, value: Any) -> None:
    assert convert(schema, text, **{"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}) == value


def test_undeclared_parameters_and_tools_are_strings() -> None:
    """Nothing is read from the look of a text; a schema of additional properties counts."""
    tools = ToolSchemas(
        [
            {"function": {"name": "f", "parameters": {"properties": {}}}},
            {"name": "g", "parameters": {"additionalProperties": {"type": "integer"}}},
            {
                "function": {
                    "name": "h",
                    "parameters": {
                        "oneOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "null"}}}]
                    },
                }
            },
            {"function": {"name": "broken", "parameters": None}},
            {"function": None},
        ]
    )
    assert to_json("5", tools.types("f", "x")) == '"5"'
    assert to_json("5", tools.types("g", "x")) == "5"
    assert to_json("5", tools.types("h", "a")) == "5"
    assert to_json("null", tools.types("h", "b")) == "null"
    assert to_json("5", tools.types("missing", "x")) == '"5"'
    assert "broken" in tools
    assert "missing" not in tools


def test_digits_are_copied() -> None:
    """Neither size nor form of a number changes."""
    for text in ("9" * 400, "-0", "1.50", "1E+5"):
        assert to_json(text, frozenset({"number", "integer"})) == text


def test_references_are_bounded() -> None:
    """A schema that refers to itself in many branches is answered at once."""
    schema: dict[str, Any] = {"anyOf": [{"$ref": "#"}] * 50}
    assert to_json("5", ToolSchemas([{"name": "f", "parameters": schema}]).types("f", "x")) == '"5"'

"""A schema or more for every keyword of JSON Schema: what is enforced, and what is refused with its path. The table of the documentation is made from this."""

from __future__ import annotations

from tokenspeed_plugin_grammar_xgrammar.testing.container_keywords import CONTAINER_ROWS
from tokenspeed_plugin_grammar_xgrammar.testing.keyword_row import PAIR, Row
from tokenspeed_plugin_grammar_xgrammar.testing.value_keywords import VALUE_ROWS

__all__ = ["ROWS", "Row", "table"]

ROWS = (
    *VALUE_ROWS,
    *CONTAINER_ROWS,
    Row(
        "allOf",
        "enforced: combined keyword by keyword",
        (
            {"allOf": [{"type": "integer"}, {"minimum": 2}, {"maximum": 9}]},
            {
                "allOf": [
                    {**PAIR, "required": ["a"]},
                    {"properties": {"a": {"minimum": 3}, "c": {"type": "null"}}, "required": ["c"]},
                ]
            },
        ),
    ),
    Row(
        "anyOf",
        "enforced, combined with what stands beside it",
        (
            {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 5}]},
            {**PAIR, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            {"anyOf": [{"type": "boolean"}, {"type": "null"}], "type": "null"},
        ),
    ),
    Row(
        "oneOf",
        "enforced where the alternatives exclude each other by type, constants, ranges, or a required property",
        (
            {"oneOf": [{"type": "boolean"}, {"type": "null"}, {"enum": ["a", 1]}]},
            {
                "oneOf": [
                    {"properties": {"k": {"const": "x"}, "v": {"type": "null"}}, "required": ["k"], "type": "object"},
                    {"properties": {"k": {"const": "y"}}, "required": ["k"], "type": "object"},
                ]
            },
            {"oneOf": [{"type": "integer", "maximum": 2}, {"type": "integer", "minimum": 5}]},
        ),
        (
            ({"oneOf": [{"type": "integer"}, {"minimum": 2, "type": "number"}]}, "$.oneOf"),
            ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, "$.oneOf"),
        ),
    ),
    Row(
        "not",
        "refused, but beside enum or const",
        ({"enum": [1, 2, "a"], "not": {"type": "string"}},),
        (
            ({"not": {"type": "string"}}, "$.not"),
            ({"type": "object", "properties": {"a b": {"not": {}}}}, "$.properties['a b'].not"),
        ),
    ),
    Row(
        "if",
        "refused with then or else; says nothing alone",
        ({"type": "null", "if": {}},),
        (({"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 2}}, "$.if"),),
    ),
    Row(
        "then",
        "with if",
        ({"type": "null", "then": False},),
        (({"if": {"type": "null"}, "then": {"const": 1}}, "$.if"),),
    ),
    Row(
        "else",
        "with if",
        ({"type": "null", "else": False},),
        (({"if": {"type": "null"}, "else": {"const": 1}}, "$.if"),),
    ),
    Row(
        "$ref",
        "enforced for paths in the same schema, recursion included; siblings count",
        (
            {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}},
            {
                "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                "required": ["next"],
                "type": "object",
            },
            {"$ref": "#/$defs/i", "maximum": 3, "$defs": {"i": {"type": "integer"}}},
            {
                "$ref": "#/definitions/v",
                "definitions": {"v": {"anyOf": [{"type": "null"}, {"$ref": "#/definitions/v"}]}},
            },
        ),
        (
            ({"$ref": "https://example.com/schema"}, "$.$ref"),
            ({"$ref": "#/$defs/none"}, "$.$ref"),
            ({"$ref": "#"}, "$.$ref"),
            ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "$.items.$ref"),
        ),
    ),
    Row("$dynamicRef", "refused", (), (({"$dynamicRef": "#x"}, "$.$dynamicRef"),)),
    Row("$recursiveRef", "refused", (), (({"$recursiveRef": "#"}, "$.$recursiveRef"),)),
    Row(
        "$id",
        "says nothing at the root; refused below",
        ({"$id": "https://example.com/x", "type": "null"},),
        (({"properties": {"a": {"$id": "y"}}}, "$.properties.a.$id"),),
    ),
    Row(
        "id",
        "as $id",
        ({"id": "https://example.com/x", "type": "null"},),
        (({"properties": {"a": {"id": "y"}}}, "$.properties.a.id"),),
    ),
    Row(
        "$dynamicAnchor",
        "says nothing without the references that are refused",
        ({"$dynamicAnchor": "x", "type": "null"},),
    ),
    Row(
        "$recursiveAnchor",
        "says nothing without the references that are refused",
        ({"$recursiveAnchor": True, "type": "null"},),
    ),
    Row(
        "true and false",
        "enforced",
        (True, {"type": "object", "properties": {"a": True}, "required": ["a"]}),
        ((False, "$"), ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "$")),
    ),
    Row(
        "any other word",
        "refused, but for those that begin with x-",
        ({"type": "null", "x-note": 1},),
        (
            ({"type": "string", "nullable": True}, "$.nullable"),
            ({"type": "array", "items": {"unique": True}}, "$.items.unique"),
        ),
    ),
)


def table() -> str:
    """The table of the documentation, in Markdown."""
    from tokenspeed_plugin_grammar_xgrammar.keywords import ANNOTATIONS

    lines = ["| keyword | what happens |", "|---|---|", *(f"| `{row.keyword}` | {row.how} |" for row in ROWS)]
    names = ", ".join(f"`{name}`" for name in sorted(ANNOTATIONS))
    return "\n".join(lines) + f"\n\nThese only describe, and are not read: {names}.\n"

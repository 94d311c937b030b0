"""A schema or more for every keyword of JSON Schema: what is enforced, and what is refused with its path. The table of the documentation is made from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ROWS", "Row", "table"]

Schema = Any


@dataclass(frozen=True, slots=True)
class Row:
    """One keyword.

    Attributes:
        keyword: its name.
        how: what happens to it, for the table.
        enforced: schemas that are taken; every text that they generate is valid.
        refused: schemas that are not, with the path that the error names.
    """

    keyword: str
    how: str
    enforced: tuple[Schema, ...] = ()
    refused: tuple[tuple[Schema, str], ...] = ()


_A: Schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}}
_NULLS: Schema = {"type": "array", "items": {"type": "null"}}

ROWS = (
    Row(
        "type",
        "enforced",
        (
            *tuple({"type": kind} for kind in ("null", "boolean", "integer", "number", "string", "array", "object")),
            {"type": ["string", "null"]},
        ),
    ),
    Row(
        "enum",
        "enforced; values that other keywords exclude are left out",
        ({"enum": [1, "a", None, {"x": [1.5]}]}, {"enum": ["a", 1, "abc"], "type": "string", "minLength": 2}),
    ),
    Row("const", "enforced", ({"const": {"a": [True, 'é\n"']}}, {"const": 1.0}), (({"const": 2**64}, "$.const"),)),
    Row(
        "minimum",
        "enforced",
        ({"type": "integer", "minimum": -3}, {"type": "number", "minimum": 1.25}),
        (({"type": "number", "minimum": 1e20}, "$.minimum"),),
    ),
    Row(
        "maximum",
        "enforced",
        ({"type": "integer", "maximum": 12}, {"type": "number", "minimum": -0.5, "maximum": 0.75}),
    ),
    Row(
        "exclusiveMinimum",
        "enforced; also as true beside minimum",
        (
            {"type": "number", "exclusiveMinimum": 0},
            {"type": "integer", "exclusiveMinimum": 1.5},
            {"type": "integer", "minimum": 4, "exclusiveMinimum": True},
        ),
    ),
    Row(
        "exclusiveMaximum",
        "enforced; also as true beside maximum",
        ({"type": "number", "exclusiveMaximum": 1, "minimum": 0}, {"type": "integer", "exclusiveMaximum": -1}),
    ),
    Row(
        "multipleOf",
        "enforced for integers: up to 100, or to 1024 between two bounds",
        (
            {"type": "integer", "multipleOf": 7},
            {"type": "integer", "multipleOf": 6, "minimum": -20, "maximum": 50},
            {"type": "number", "multipleOf": 2},
            {"allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 6}]},
        ),
        (
            ({"type": "number", "multipleOf": 0.01}, "$.multipleOf"),
            ({"type": "integer", "multipleOf": 3, "minimum": 0}, "$.multipleOf"),
            ({"type": "integer", "multipleOf": 1000}, "$.multipleOf"),
        ),
    ),
    Row(
        "minLength",
        "enforced; beside a pattern where the pattern can be counted",
        ({"type": "string", "minLength": 2}, {"type": "string", "pattern": "^[a-z]*$", "minLength": 5, "maxLength": 9}),
        (({"type": "string", "pattern": "^(ab|c)*$", "minLength": 5}, "$.minLength"),),
    ),
    Row(
        "maxLength",
        "enforced, as minLength",
        ({"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^[A-Z][a-z]+$", "maxLength": 4}),
        (({"type": "string", "pattern": "^(ab)+$", "maxLength": 5}, "$.maxLength"),),
    ),
    Row(
        "pattern",
        "enforced, by ECMAScript's rules; look-around, back references, word boundaries and Unicode properties are refused",
        (
            {"type": "string", "pattern": "^[a-c]{2}\\d?$"},
            {"type": "string", "pattern": "[b-y]"},
            {"type": "string", "pattern": "^a|[b-y]$"},
            {"type": "string", "pattern": "^\\S[a-m]\\w*$"},
            {"type": "string", "pattern": "^[0-5][0-9](\\.[0-9]+)?Z$"},
            {"type": "string", "pattern": "^(a|a(b|c)?)*$"},
        ),
        (
            ({"type": "string", "pattern": "^(?=a)"}, "$.pattern"),
            ({"type": "string", "pattern": "(a)\\1"}, "$.pattern"),
            ({"type": "string", "pattern": "\\bx"}, "$.pattern"),
            ({"type": "string", "pattern": "^\\n$"}, "$.pattern"),
            ({"allOf": [{"pattern": "a", "type": "string"}, {"pattern": "b"}]}, "$.allOf[1].pattern"),
        ),
    ),
    Row(
        "format",
        "date, time, date-time, duration, email, hostname, ipv4, ipv6, uri, uuid and json-pointer are enforced; others are refused",
        tuple(
            {"type": "string", "format": name}
            for name in (
                "date",
                "time",
                "date-time",
                "duration",
                "email",
                "hostname",
                "ipv4",
                "ipv6",
                "uri",
                "uuid",
                "json-pointer",
            )
        ),
        (
            ({"type": "string", "format": "idn-email"}, "$.format"),
            ({"type": "string", "format": "regex"}, "$.format"),
            ({"type": "string", "format": "made-up"}, "$.format"),
        ),
    ),
    Row(
        "contentEncoding",
        "base64 is enforced; others are refused",
        ({"type": "string", "contentEncoding": "base64"},),
        (({"type": "string", "contentEncoding": "base32"}, "$.contentEncoding"),),
    ),
    Row(
        "contentMediaType",
        "refused",
        (),
        (({"type": "string", "contentMediaType": "application/json"}, "$.contentMediaType"),),
    ),
    Row("contentSchema", "refused", (), (({"type": "string", "contentSchema": {}}, "$.contentSchema"),)),
    Row(
        "prefixItems",
        "enforced",
        (
            {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}]},
            {"type": "array", "prefixItems": [{"type": "boolean"}, False]},
        ),
    ),
    Row(
        "items",
        "enforced; a list of schemas, as in older drafts, is prefixItems",
        (
            _NULLS,
            {"type": "array", "items": False},
            {"type": "array", "items": [{"type": "null"}], "additionalItems": False},
        ),
    ),
    Row(
        "additionalItems",
        "enforced beside a list of items, says nothing otherwise",
        ({"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "boolean"}},),
    ),
    Row("minItems", "enforced", ({**_NULLS, "minItems": 2}, {"type": "array", "minItems": 1})),
    Row(
        "maxItems",
        "enforced",
        (
            {**_NULLS, "maxItems": 2},
            {**_NULLS, "maxItems": 0},
            {"type": "array", "prefixItems": [{"type": "null"}] * 3, "maxItems": 2},
        ),
    ),
    Row(
        "uniqueItems",
        "refused for more than one item",
        ({**_NULLS, "uniqueItems": True, "maxItems": 1}, {**_NULLS, "uniqueItems": False}),
        (
            ({**_NULLS, "uniqueItems": True}, "$.uniqueItems"),
            ({"type": "object", "properties": {"a": {**_NULLS, "uniqueItems": True}}}, "$.properties.a.uniqueItems"),
        ),
    ),
    Row(
        "contains",
        "refused, but for minContains 0",
        ({**_NULLS, "contains": {"const": 1}, "minContains": 0},),
        (({"type": "array", "contains": {"type": "null"}}, "$.contains"),),
    ),
    Row(
        "minContains",
        "with contains",
        ({**_NULLS, "minContains": 2},),
        (({"type": "array", "contains": {}, "minContains": 2}, "$.contains"),),
    ),
    Row(
        "maxContains",
        "with contains",
        ({**_NULLS, "maxContains": 1},),
        (({"type": "array", "contains": {}, "minContains": 0, "maxContains": 2}, "$.contains"),),
    ),
    Row(
        "unevaluatedItems",
        "false is enforced, outside of allOf, anyOf and oneOf",
        ({"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False},),
        (({"type": "array", "unevaluatedItems": {"type": "null"}}, "$.unevaluatedItems"),),
    ),
    Row(
        "properties",
        "enforced, in the order of declaration",
        (_A, {"properties": {"größe": {"type": "null"}, 'q"\\': {"const": 1}, "f": False}}),
    ),
    Row(
        "required",
        "enforced; a name that is not declared gets the schema of additional ones",
        (
            {**_A, "required": ["b"]},
            {"type": "object", "required": ["x"]},
            {"type": "object", "required": ["x"], "additionalProperties": {"type": "null"}},
        ),
    ),
    Row(
        "additionalProperties",
        "enforced; where properties are declared and this is not given, no others are generated",
        (
            {**_A, "additionalProperties": {"type": "null"}},
            {"type": "object", "additionalProperties": {"type": "boolean"}},
            {**_A, "additionalProperties": False},
        ),
    ),
    Row(
        "patternProperties",
        "enforced: one pattern, or any number beside declared properties, for which they count",
        (
            {"type": "object", "patternProperties": {"^x-": {"type": "null"}}},
            {
                "type": "object",
                "patternProperties": {"a": {"minimum": 5}, "b": True},
                "properties": {"ab": {"type": "integer"}},
            },
        ),
        (
            (
                {"type": "object", "patternProperties": {"^a": {"type": "null"}, "b$": {"type": "boolean"}}},
                "$.patternProperties['b$']",
            ),
        ),
    ),
    Row(
        "propertyNames",
        "enforced",
        (
            {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}},
            {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "null"}},
            {"type": "object", "propertyNames": {"maxLength": 2}},
            {"type": "object", "properties": {"a": {"type": "null"}, "abc": {}}, "propertyNames": {"maxLength": 2}},
        ),
        (({"type": "object", "propertyNames": {"anyOf": [{"maxLength": 1}, {"pattern": "^a"}]}}, "$.propertyNames"),),
    ),
    Row(
        "minProperties",
        "enforced; above one more than the required ones only where no other names than declared ones are generated",
        (
            {**_A, "minProperties": 1},
            {**_A, "minProperties": 2},
            {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
        ),
        (({"type": "object", "minProperties": 2}, "$.minProperties"),),
    ),
    Row(
        "maxProperties",
        "enforced",
        ({**_A, "maxProperties": 1}, {"type": "object", "maxProperties": 1}, {"type": "object", "maxProperties": 0}),
    ),
    Row(
        "dependentRequired",
        "refused, unless what it asks for is required, or its property is not generated",
        ({**_A, "required": ["a"], "dependentRequired": {"b": ["a"]}}, {**_A, "dependentRequired": {"c": ["a"]}}),
        (
            ({**_A, "dependentRequired": {"a": ["b"]}}, "$.dependentRequired.a"),
            ({"type": "object", "dependentRequired": {"x": ["y"]}}, "$.dependentRequired.x"),
        ),
    ),
    Row(
        "dependentSchemas",
        "refused",
        (),
        (({**_A, "dependentSchemas": {"a": {"required": ["b"]}}}, "$.dependentSchemas"),),
    ),
    Row(
        "dependencies",
        "as dependentRequired and dependentSchemas",
        ({**_A, "required": ["a"], "dependencies": {"b": ["a"]}},),
        (({**_A, "dependencies": {"a": ["b"]}}, "$.dependentRequired.a"),),
    ),
    Row(
        "unevaluatedProperties",
        "false is enforced, outside of allOf, anyOf and oneOf",
        (
            {**_A, "unevaluatedProperties": False},
            {"allOf": [_A], "properties": {"c": {"type": "null"}}, "unevaluatedProperties": False},
        ),
        (
            ({**_A, "unevaluatedProperties": {"type": "null"}}, "$.unevaluatedProperties"),
            ({"allOf": [{**_A, "unevaluatedProperties": False}]}, "$.allOf[0].unevaluatedProperties"),
        ),
    ),
    Row(
        "allOf",
        "enforced: combined keyword by keyword",
        (
            {"allOf": [{"type": "integer"}, {"minimum": 2}, {"maximum": 9}]},
            {
                "allOf": [
                    {**_A, "required": ["a"]},
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
            {**_A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
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

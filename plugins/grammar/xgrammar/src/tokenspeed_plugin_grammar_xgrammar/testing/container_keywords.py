"""Keywords of arrays and objects."""

from __future__ import annotations

from tokenspeed_plugin_grammar_xgrammar.testing.keyword_row import NULLS, PAIR, Row

__all__ = ["CONTAINER_ROWS"]

CONTAINER_ROWS = (
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
            NULLS,
            {"type": "array", "items": False},
            {"type": "array", "items": [{"type": "null"}], "additionalItems": False},
        ),
    ),
    Row(
        "additionalItems",
        "enforced beside a list of items, says nothing otherwise",
        ({"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "boolean"}},),
    ),
    Row("minItems", "enforced", ({**NULLS, "minItems": 2}, {"type": "array", "minItems": 1})),
    Row(
        "maxItems",
        "enforced",
        (
            {**NULLS, "maxItems": 2},
            {**NULLS, "maxItems": 0},
            {"type": "array", "prefixItems": [{"type": "null"}] * 3, "maxItems": 2},
        ),
    ),
    Row(
        "uniqueItems",
        "refused for more than one item",
        ({**NULLS, "uniqueItems": True, "maxItems": 1}, {**NULLS, "uniqueItems": False}),
        (
            ({**NULLS, "uniqueItems": True}, "$.uniqueItems"),
            ({"type": "object", "properties": {"a": {**NULLS, "uniqueItems": True}}}, "$.properties.a.uniqueItems"),
        ),
    ),
    Row(
        "contains",
        "refused, but for minContains 0",
        ({**NULLS, "contains": {"const": 1}, "minContains": 0},),
        (({"type": "array", "contains": {"type": "null"}}, "$.contains"),),
    ),
    Row(
        "minContains",
        "with contains",
        ({**NULLS, "minContains": 2},),
        (({"type": "array", "contains": {}, "minContains": 2}, "$.contains"),),
    ),
    Row(
        "maxContains",
        "with contains",
        ({**NULLS, "maxContains": 1},),
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
        (PAIR, {"properties": {"größe": {"type": "null"}, 'q"\\': {"const": 1}, "f": False}}),
    ),
    Row(
        "required",
        "enforced; a name that is not declared gets the schema of additional ones",
        (
            {**PAIR, "required": ["b"]},
            {"type": "object", "required": ["x"]},
            {"type": "object", "required": ["x"], "additionalProperties": {"type": "null"}},
        ),
    ),
    Row(
        "additionalProperties",
        "enforced; where properties are declared and this is not given, no others are generated",
        (
            {**PAIR, "additionalProperties": {"type": "null"}},
            {"type": "object", "additionalProperties": {"type": "boolean"}},
            {**PAIR, "additionalProperties": False},
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
            {**PAIR, "minProperties": 1},
            {**PAIR, "minProperties": 2},
            {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
        ),
        (({"type": "object", "minProperties": 2}, "$.minProperties"),),
    ),
    Row(
        "maxProperties",
        "enforced",
        ({**PAIR, "maxProperties": 1}, {"type": "object", "maxProperties": 1}, {"type": "object", "maxProperties": 0}),
    ),
    Row(
        "dependentRequired",
        "refused, unless what it asks for is required, or its property is not generated",
        ({**PAIR, "required": ["a"], "dependentRequired": {"b": ["a"]}}, {**PAIR, "dependentRequired": {"c": ["a"]}}),
        (
            ({**PAIR, "dependentRequired": {"a": ["b"]}}, "$.dependentRequired.a"),
            ({"type": "object", "dependentRequired": {"x": ["y"]}}, "$.dependentRequired.x"),
        ),
    ),
    Row(
        "dependentSchemas",
        "refused",
        (),
        (({**PAIR, "dependentSchemas": {"a": {"required": ["b"]}}}, "$.dependentSchemas"),),
    ),
    Row(
        "dependencies",
        "as dependentRequired and dependentSchemas",
        ({**PAIR, "required": ["a"], "dependencies": {"b": ["a"]}},),
        (({**PAIR, "dependencies": {"a": ["b"]}}, "$.dependentRequired.a"),),
    ),
    Row(
        "unevaluatedProperties",
        "false is enforced, outside of allOf, anyOf and oneOf",
        (
            {**PAIR, "unevaluatedProperties": False},
            {"allOf": [PAIR], "properties": {"c": {"type": "null"}}, "unevaluatedProperties": False},
        ),
        (
            ({**PAIR, "unevaluatedProperties": {"type": "null"}}, "$.unevaluatedProperties"),
            ({"allOf": [{**PAIR, "unevaluatedProperties": False}]}, "$.allOf[0].unevaluatedProperties"),
        ),
    ),
)

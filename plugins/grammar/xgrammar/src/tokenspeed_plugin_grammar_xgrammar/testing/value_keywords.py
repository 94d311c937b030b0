"""Keywords of single values: types, numbers, strings."""

from __future__ import annotations

from tokenspeed_plugin_grammar_xgrammar.testing.keyword_row import Row

__all__ = ["VALUE_ROWS"]

VALUE_ROWS = (
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
)

"""Whether one JSON value satisfies a schema: exact, for constants that a schema lists and for names that it declares."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tokenspeed_plugin_grammar_xgrammar.formats import ENCODINGS, FORMATS, format_pattern
from tokenspeed_plugin_grammar_xgrammar.limits import MAX_EVALUATION, MAX_EVALUATION_DEPTH, refuse
from tokenspeed_plugin_grammar_xgrammar.regex import Node, matches, search, size
from tokenspeed_plugin_grammar_xgrammar.regex_parser import parse

__all__ = ["Evaluator", "json_type", "same_key"]


def json_type(value: Any) -> str:
    """The type of a value by JSON Schema's names; ``integer`` for numbers without a fraction."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    return {float: "number", str: "string", list: "array", dict: "object"}[type(value)]


def same_key(value: Any) -> Any:
    """A hashable that two values share exactly if they are equal as JSON: 1 and 1.0 are, 1 and true are not."""
    kind = json_type(value)
    if kind == "array":
        return kind, tuple(map(same_key, value))
    if kind == "object":
        return kind, frozenset((key, same_key(item)) for key, item in value.items())
    return ("number" if kind == "integer" else kind), value


class Evaluator:
    """Evaluates schemas for constants, within a budget of steps for one request.

    Args:
        resolve: finds the schema that a ``$ref`` names.
    """

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        self.resolve = resolve
        self._steps = 0
        self._depth = 0

    def spend(self, steps: int, path: str) -> None:
        """Count ``steps``.

        Raises:
            GrammarError: the budget is used up.
        """
        self._steps += steps
        if self._steps > MAX_EVALUATION:
            raise refuse(path, "takes too long to check constants against; give fewer or shorter ones")

    def holds(self, value: Any, schema: Any, path: str) -> bool:
        """Whether ``value`` is valid against ``schema``, whose keywords are known to be well-formed.

        Raises:
            GrammarError: a keyword decides that this cannot evaluate.
        """
        self.spend(1, path)
        if isinstance(schema, bool):
            return schema
        if self._depth == MAX_EVALUATION_DEPTH:
            raise refuse(
                path,
                f"a constant is checked against schemas more than {MAX_EVALUATION_DEPTH} deep, or that refer to themselves endlessly",
            )
        self._depth += 1
        try:
            return all(
                _RULES[key](Asked(self, schema, path), value, wanted) for key, wanted in schema.items() if key in _RULES
            )
        finally:
            self._depth -= 1


@dataclass(frozen=True, slots=True)
class Asked:
    """The schema object whose keyword is evaluated."""

    work: Evaluator
    schema: Mapping[str, Any]
    path: str

    def check(self, value: Any, schema: Any) -> bool:
        """Whether ``value`` is valid against a schema inside this one."""
        return self.work.holds(value, schema, self.path)


_Rule = Callable[[Asked, Any, Any], bool]


def _number(compare: Callable[[Any, Any], bool]) -> _Rule:
    return lambda _, value, wanted: json_type(value) not in ("integer", "number") or compare(value, wanted)


def _sized(kind: str, compare: Callable[[int, int], bool]) -> _Rule:
    return lambda _, value, wanted: json_type(value) != kind or compare(len(value), wanted)


def _type(_: Asked, value: Any, wanted: Any) -> bool:
    kinds = [wanted] if isinstance(wanted, str) else wanted
    return (kind := json_type(value)) in kinds or (kind == "integer" and "number" in kinds)


def _multiple(value: Any, wanted: Any) -> bool:
    return math.isfinite(value) and (Fraction(str(value)) / Fraction(str(wanted))).denominator == 1


def _pattern(asked: Asked, value: Any, wanted: str) -> bool:
    where = f"{asked.path}.pattern"
    return not isinstance(value, str) or _matches(asked, search(parse(wanted, where), where), value)


def _named(keyword: str, known: Collection[str]) -> _Rule:
    def rule(asked: Asked, value: Any, wanted: str) -> bool:
        if not isinstance(value, str):
            return True
        if wanted not in known:
            raise refuse(
                f"{asked.path}.{keyword}", f"{wanted!r} cannot be enforced; those that can: {', '.join(known)}"
            )
        return _matches(asked, format_pattern(wanted), value)

    return rule


def _matches(asked: Asked, tree: Node, value: str) -> bool:
    asked.work.spend(size(tree) * (len(value) + 1) // 16, asked.path)
    return matches(tree, value)


def _properties(asked: Asked, value: Any, wanted: Mapping[str, Any]) -> bool:
    return not isinstance(value, dict) or all(
        asked.check(value[name], inner) for name, inner in wanted.items() if name in value
    )


def _items(asked: Asked, value: Any, wanted: Any) -> bool:
    return not isinstance(value, list) or all(
        asked.check(item, wanted) for item in value[len(asked.schema.get("prefixItems", ())) :]
    )


def _additional(asked: Asked, value: Any, wanted: Any) -> bool:
    if not isinstance(value, dict):
        return True
    return all(
        asked.check(item, wanted) for name, item in value.items() if name not in asked.schema.get("properties", {})
    )


def _unknown(keyword: str) -> _Rule:
    def rule(asked: Asked, value: Any, _: Any) -> bool:
        if isinstance(value, list | dict):
            raise refuse(f"{asked.path}.{keyword}", "cannot be evaluated for a constant")
        return True

    return rule


_RULES: dict[str, _Rule] = {
    "type": _type,
    "const": lambda _, value, wanted: same_key(value) == same_key(wanted),
    "enum": lambda _, value, wanted: any(same_key(value) == same_key(item) for item in wanted),
    "minimum": _number(lambda value, wanted: value >= wanted),
    "maximum": _number(lambda value, wanted: value <= wanted),
    "exclusiveMinimum": _number(lambda value, wanted: value > wanted),
    "exclusiveMaximum": _number(lambda value, wanted: value < wanted),
    "multipleOf": _number(_multiple),
    "minLength": _sized("string", lambda length, wanted: length >= wanted),
    "maxLength": _sized("string", lambda length, wanted: length <= wanted),
    "minItems": _sized("array", lambda length, wanted: length >= wanted),
    "maxItems": _sized("array", lambda length, wanted: length <= wanted),
    "minProperties": _sized("object", lambda length, wanted: length >= wanted),
    "maxProperties": _sized("object", lambda length, wanted: length <= wanted),
    "pattern": _pattern,
    "format": _named("format", FORMATS),
    "contentEncoding": _named("contentEncoding", ENCODINGS),
    "uniqueItems": lambda _, value, wanted: (
        not wanted or not isinstance(value, list) or len({same_key(item) for item in value}) == len(value)
    ),
    "prefixItems": lambda asked, value, wanted: not isinstance(value, list) or all(map(asked.check, value, wanted)),
    "items": _items,
    "properties": _properties,
    "required": lambda _, value, wanted: not isinstance(value, dict) or all(name in value for name in wanted),
    "additionalProperties": _additional,
    "propertyNames": lambda asked, value, wanted: (
        not isinstance(value, dict) or all(asked.check(name, wanted) for name in value)
    ),
    "allOf": lambda asked, value, wanted: all(asked.check(value, inner) for inner in wanted),
    "anyOf": lambda asked, value, wanted: any(asked.check(value, inner) for inner in wanted),
    "oneOf": lambda asked, value, wanted: sum(asked.check(value, inner) for inner in wanted) == 1,
    "not": lambda asked, value, wanted: not asked.check(value, wanted),
    "$ref": lambda asked, value, wanted: asked.check(value, asked.work.resolve(wanted)),
    "if": lambda asked, value, wanted: asked.check(
        value, asked.schema.get("then" if asked.check(value, wanted) else "else", True)
    ),
    **{
        keyword: _unknown(keyword)
        for keyword in (
            "additionalItems",
            "contains",
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "patternProperties",
            "unevaluatedItems",
            "unevaluatedProperties",
        )
    },
}

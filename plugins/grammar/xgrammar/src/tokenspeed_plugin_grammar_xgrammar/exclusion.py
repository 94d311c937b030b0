"""Proofs that no value is valid against two schemas, for ``oneOf``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_plugin_grammar_xgrammar.conjunction import Conjunction, Document
from tokenspeed_plugin_grammar_xgrammar.values import same_key

__all__ = ["ALL_KINDS", "exclude_each_other", "kinds_of"]

#: Types as they exclude each other: a number is an integer or has a fraction.
ALL_KINDS = frozenset(("null", "boolean", "object", "array", "string", "integer", "fraction"))
_MAX_CASES = 64


def kinds_of(types: str | list[str]) -> frozenset[str]:
    """The kinds that a ``type`` keyword allows."""
    names = {types} if isinstance(types, str) else set(types)
    return frozenset(names - {"number"} | ({"integer", "fraction"} if "number" in names else set()))


@dataclass(slots=True)
class Case:
    """What surely holds for every value of one combination of alternatives."""

    conjunction: Conjunction
    kinds: frozenset[str] = ALL_KINDS
    values: list[Any] | None = None
    low: float = float("-inf")
    high: float = float("inf")
    required: set[str] = field(default_factory=set)
    tags: dict[str, frozenset[Any]] = field(default_factory=dict)  # values that a property can have
    closed: list[frozenset[str]] = field(default_factory=list)  # each: no name but these


def _cases(document: Document, conjunction: Conjunction) -> Iterator[Case]:
    if not conjunction.choices:
        yield _case(conjunction)
        return
    first, *rest = conjunction.choices
    base = Conjunction(conjunction.subs, conjunction.atoms, rest)
    for option in first.options:
        if (found := document.flatten([option], first.active, owner=False)) is not None:
            yield from _cases(document, base.joined(found))


def _case(conjunction: Conjunction) -> Case:
    case = Case(conjunction)
    for atom in conjunction.atoms:
        words = atom.words
        if "type" in words:
            case.kinds &= kinds_of(words["type"])
        for values in ([words["const"]] if "const" in words else None, words.get("enum")):
            if values is not None and (case.values is None or len(values) < len(case.values)):
                case.values = values
        case.low = max(case.low, words.get("minimum", case.low), words.get("exclusiveMinimum", case.low))
        case.high = min(case.high, words.get("maximum", case.high), words.get("exclusiveMaximum", case.high))
        case.required |= set(words.get("required", ()))
        if words.get("additionalProperties") is False and "patternProperties" not in words:
            case.closed.append(frozenset(words.get("properties", ())))
        for name, schema in words.get("properties", {}).items():
            if isinstance(schema, dict) and ("const" in schema or isinstance(schema.get("enum"), list)):
                values = frozenset(map(same_key, [schema["const"]] if "const" in schema else schema["enum"]))
                case.tags[name] = case.tags.get(name, values) & values
    return case


def _apart(document: Document, a: Case, b: Case) -> bool:
    for one, other in ((a, b), (b, a)):
        if one.values is not None:
            return not any(
                document.holds(value, other.conjunction.subs) and document.holds(value, one.conjunction.subs)
                for value in one.values
            )
    shared = a.kinds & b.kinds
    if not shared:
        return True
    if shared == {"object"}:
        both = a.required & b.required & a.tags.keys() & b.tags.keys()
        if any(not a.tags[name] & b.tags[name] for name in both):
            return True
        return any(one.required - names for one, other in ((a, b), (b, a)) for names in other.closed)
    return shared <= {"integer", "fraction"} and (a.high < b.low or b.high < a.low)


def exclude_each_other(document: Document, beside: Conjunction, options: list[Conjunction]) -> tuple[int, int] | None:
    """The first two of ``options``, each together with ``beside``, that may share a value; ``None``: no two do."""
    cases: list[list[Case]] = []
    for conjunction in options:
        cases.append([])
        for case in _cases(document, Conjunction(atoms=beside.atoms).joined(conjunction)):
            cases[-1].append(case)
            if len(cases[-1]) > _MAX_CASES:
                return len(cases) - 1, len(cases) - 1
    for j in range(len(cases)):
        for i in range(j):
            if not all(_apart(document, a, b) for a in cases[i] for b in cases[j]):
                return i, j
    return None

"""JSON schemas as the TypeScript types in which harmony shows functions to the model.

Source of the form: the harmony format's documentation and its reference renderer. One addition: ``anyOf`` becomes a union (there it is ``any``), because
optional values are commonly declared so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["typescript"]

_NAMES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def typescript(schema: Mapping[str, Any], indent: str = "") -> str:
    """The type of values that ``schema`` describes; ``any`` where it says nothing that a type can show."""
    one_of = schema.get("oneOf")
    if isinstance(one_of, list):
        return "".join(f"\n{indent} | {_variant(variant, indent)}{_note(variant, quoted=True)}" for variant in one_of)
    kind = schema.get("type")
    if isinstance(kind, list) and kind:
        return " | ".join("number" if name == "integer" else str(name) for name in kind)
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        items = schema.get("items")
        return f"{typescript(items, indent)}[]" if isinstance(items, Mapping) else "Array<any>"
    if kind == "string" and (texts := [value for value in _listed(schema, "enum") if isinstance(value, str)]):
        return " | ".join(f'"{text}"' for text in texts)
    if kind is None and (choices := _listed(schema, "anyOf")):
        return " | ".join(dict.fromkeys(_member(choice, indent) for choice in choices))
    return _NAMES.get(str(kind), "any")


def _member(choice: Mapping[str, Any], indent: str) -> str:
    return "null" if choice.get("type") == "null" else typescript(choice, indent)


def _object(schema: Mapping[str, Any], indent: str) -> str:
    lines = [f"{indent}// {schema['description']}\n"] if isinstance(schema.get("description"), str) else []
    lines.append("{\n")
    required = set(_listed(schema, "required"))
    for name, value in (schema.get("properties") or {}).items():
        mark = "" if name in required else "?"
        lines += _property(f"{indent}{name}{mark}:", value if isinstance(value, Mapping) else {}, indent)
    return "".join([*lines, f"{indent}}}"])


def _property(head: str, value: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    if isinstance(value.get("title"), str):
        lines.append(f"{indent}// {value['title']}\n{indent}//\n")
    one_of = value.get("oneOf")
    if one_of is None and isinstance(value.get("description"), str):
        lines.append(f"{indent}// {value['description']}\n")
    if examples := [text for text in _listed(value, "examples") if isinstance(text, str)]:
        lines += [f"{indent}// Examples:\n", *(f'{indent}// - "{text}"\n' for text in examples)]
    elif _listed(value, "examples"):
        lines.append(f"{indent}// Examples:\n")
    if isinstance(one_of, list):
        return [*lines, *_choices(head, value, one_of, indent)]
    shown = _nullable(value, typescript(value, f"{indent}    "))
    default = f" // default: {_default(value)}" if "default" in value and one_of is None else ""
    return [*lines, f"{head} {shown},{default}\n"]


def _choices(head: str, value: Mapping[str, Any], variants: Sequence[Mapping[str, Any]], indent: str) -> list[str]:
    """A property that is one of several: each on a line of its own. A description that the first one repeats is shown there alone."""
    about = value.get("description")
    above = isinstance(about, str) and not (variants and variants[0].get("description") == about)
    lines = [f"{indent}// {about}\n"] if above else []
    if "default" in value:
        lines.append(f"{indent}// default: {_default(value)}\n")
    lines.append(f"{head}\n")
    for at, variant in enumerate(variants):
        silent = (at == 0 and above) or variant.get("description") == about
        lines.append(f"{indent} | {_variant(variant, indent)}{_note(variant, described=not silent)}\n")
    return [*lines, f"{indent},\n"]


def _variant(variant: Mapping[str, Any], indent: str) -> str:
    return _nullable(variant, typescript(variant, f"{indent}   "))


def _nullable(schema: Mapping[str, Any], shown: str) -> str:
    return f"{shown} | null" if schema.get("nullable") is True and "null" not in shown else shown


def _note(schema: Mapping[str, Any], *, described: bool = True, quoted: bool = False) -> str:
    """What stands behind a type; ``quoted``: a text that is one of an enumeration is quoted too, as the reference renderer does in nested unions."""
    notes = [schema["description"]] if described and isinstance(schema.get("description"), str) else []
    if "default" in schema:
        notes.append(f"default: {_compact(schema['default']) if quoted else _default(schema)}")
    return f" // {' '.join(notes)}" if notes else ""


def _default(schema: Mapping[str, Any]) -> str:
    value = schema["default"]
    if isinstance(value, str):
        return value if _listed(schema, "enum") else f'"{value}"'
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _listed(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []

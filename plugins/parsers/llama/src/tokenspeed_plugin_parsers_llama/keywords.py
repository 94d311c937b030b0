"""What a call's parentheses may hold, as a structural tag: keyword arguments whose values are JSON, which this format's readers take for Python's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.parsing import structural

__all__ = ["KEYWORD", "keywords"]

#: Names of arguments: what the parser reads back.
KEYWORD = re.compile(r"[^\W\d]\w{0,127}")

_READ = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions"))
_DESCRIBING = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "example", "examples", "deprecated")
)
#: Where all arguments are optional, which one comes first decides what follows, and each case is written out.
_MAX_CASES = 400
_LITERALS = {"boolean": ("True", "False"), "null": ("None",)}
_SEPARATOR = ", "


def keywords(parameters: Mapping[str, Any], param: str) -> structural.Format | None:
    """The keyword arguments of a function, in the order in which they are declared; ``None``: it takes none.

    Args:
        parameters: the schema of the function's arguments.
        param: where it stands in the request.

    Raises:
        GrammarError: it says more of the arguments together than one by one can be held to.
    """
    for word in parameters:
        if word not in _READ and word not in _DESCRIBING and not word.startswith("x-"):
            raise _refuse(param, f"{word} cannot be enforced for keyword arguments; give the properties themselves")
    if parameters.get("type", "object") != "object":
        raise _refuse(param, "the arguments of a call are an object")
    _check_references(parameters, param)
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    free = parameters.get("additionalProperties", True)
    if "properties" not in parameters:
        return None if free is False else _any_names(_value(free, definitions))
    properties, required = parameters["properties"], parameters.get("required", ())
    if lost := [key for key in required if properties.get(key, False) is False]:
        raise _refuse(param, f"required names {lost[0]!r}, which properties does not declare")
    return _row(
        [(key, _value(inner, definitions), key in required) for key, inner in properties.items() if inner is not False],
        param,
    )


def _row(arguments: Sequence[tuple[str, structural.Format, bool]], param: str) -> structural.Format | None:
    """Arguments, each a name, a value and whether it must be there, with separators between them."""
    if not arguments:
        return None
    firsts = next((at + 1 for at, (_, _, needed) in enumerate(arguments) if needed), len(arguments))
    if firsts > 1 and firsts * len(arguments) > _MAX_CASES:
        raise _refuse(param, "too many optional arguments before the first required one; declare a required one first")
    behind = []
    for key, value, needed in arguments:
        part = structural.tag(f"{_SEPARATOR}{key}=", value, "")
        behind.append(part if needed else {"type": "optional", "content": part})
    cases = []
    for at, (key, value, _) in enumerate(arguments[:firsts]):
        cases.append(structural.sequence(structural.tag(f"{key}=", value, ""), *behind[at + 1 :]))
    found = structural.one_of(*cases)
    return found if any(needed for _, _, needed in arguments) else {"type": "optional", "content": found}


def _any_names(value: structural.Format) -> structural.Format:
    name = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,63}"}
    one = structural.tag("", structural.sequence(name, structural.const("="), value), "")
    return {
        "type": "tags_with_separator",
        "tags": [one],
        "separator": _SEPARATOR,
        "at_least_one": False,
        "stop_after_first": False,
    }


def _value(inner: Any, definitions: Mapping[str, Any]) -> structural.Format:
    """One value: Python's words where it is nothing else, JSON otherwise."""
    if isinstance(inner, bool):
        return structural.schema({})
    kind = inner.get("type")
    if isinstance(kind, str) and kind in _LITERALS and inner.keys() - _DESCRIBING == {"type"}:
        return structural.one_of(*map(structural.const, _LITERALS[kind]))
    return structural.schema({**inner, **definitions})


def _check_references(parameters: Mapping[str, Any], param: str) -> None:
    """Each value is a schema of its own, which takes the definitions along and nothing else."""
    todo: list[Any] = [parameters]
    while todo:
        item = todo.pop()
        if isinstance(item, Mapping):
            target = item.get("$ref")
            if isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/")):
                raise _refuse(
                    param,
                    f"$ref {json.dumps(target)[:60]} leads out of $defs, which cannot be enforced for keyword arguments",
                )
            todo += item.values()
        elif isinstance(item, list):
            todo += item


def _refuse(param: str, message: str) -> GrammarError:
    return GrammarError(f"{param}: {message}", param=param, code="unsupported_grammar")

"""Pieces of structural tags: what text a grammar backend holds the model to, as plain JSON.

Parsers describe their calls with these, and never see a grammar library. The form is that of ``interfaces.grammar``'s kind ``structural_tag``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenspeed.errors import GrammarError

__all__ = [
    "Format",
    "calls",
    "const",
    "functions",
    "json_text",
    "one_of",
    "schema",
    "sequence",
    "structural_tag",
    "tag",
    "text",
    "token",
]

Format = Mapping[str, Any]

_NO_ARGUMENTS: Format = {"type": "object", "properties": {}, "additionalProperties": False}
_NAME = re.compile(r"[\w.-]+")


def structural_tag(format: Format) -> Format:
    """The whole tag around ``format``."""
    return {"type": "structural_tag", "format": format}


def const(value: str) -> Format:
    """Exactly this text."""
    return {"type": "const_string", "value": value}


def token(text: str) -> Format:
    """The one token of the vocabulary that has this text; its spelling in others is none."""
    return {"type": "token", "token": text}


def text(*excludes: str) -> Format:
    """Any text that does not contain one of ``excludes``."""
    return {"type": "any_text", "excludes": list(excludes)}


def schema(parameters: Format, style: str = "json") -> Format:
    """What fits a JSON schema, written in ``style``."""
    found: dict[str, Any] = {"type": "json_schema", "json_schema": parameters}
    return found if style == "json" else {**found, "style": style}


def sequence(*elements: Format) -> Format:
    """One behind the other."""
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Format) -> Format:
    """Any one of them."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def tag(begin: str | Format, content: Format, end: str | Format) -> Format:
    """``content`` between two texts or tokens."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_text(value: str) -> str:
    """``value`` as it stands between the quotes of a JSON string."""
    return json.dumps(value, ensure_ascii=False)[1:-1]


def functions(
    tools: Sequence[Mapping[str, Any]], names: Sequence[str] | None, *, keys: re.Pattern[str] | None = None
) -> list[tuple[str, Format]]:
    """Name and parameters of each tool that may be called, in order.

    Args:
        tools: a request's tools.
        names: those that may be called; ``None`` is all.
        keys: what the names of arguments must match, in formats that write them as they are.

    Raises:
        GrammarError: a name that not every reader takes.
    """
    found = []
    for at, entry in enumerate(tools):
        function = entry.get("function", entry)
        name = function["name"]
        if names is not None and name not in names:
            continue
        if not _NAME.fullmatch(name):
            raise GrammarError(
                f"tools[{at}].function.name: calls can be constrained for names of letters, digits, '_', '.' and '-' only, got {name[:40]!r}",
                param=f"tools[{at}].function.name",
            )
        parameters = function.get("parameters")
        if keys is not None:
            _check_keys(parameters, keys, f"tools[{at}].function.parameters")
        found.append((name, _NO_ARGUMENTS if parameters is None else parameters))
    return found


def _check_keys(parameters: object, pattern: re.Pattern[str], param: str) -> None:
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    for key in properties if isinstance(properties, Mapping) else ():
        if not pattern.fullmatch(key):
            raise GrammarError(
                f"{param}: the name of the argument {key[:40]!r} cannot be written in the model's tool format",
                param=param,
            )


def calls(
    tools: Sequence[tuple[str, Format]],
    one: Callable[[str, Format], Format],
    *,
    required: bool,
    parallel: bool,
    separator: str,
    triggers: Sequence[str],
    sections: Sequence[tuple[str, str]] = (),
    excludes: Sequence[str] = (),
) -> Format:
    """The structural tag of a format whose calls stand one behind the other.

    Args:
        tools: from ``functions``; at least one.
        one: the tag of a call, from name and parameters.
        separator: between calls.
        triggers: what announces a call or, where there are sections, one of those; every tag begins with one of them.
        sections: what may stand around all calls.
        excludes: what text outside calls must not contain: other announcements that the parser takes.
    """
    row: Format = {
        "type": "tags_with_separator",
        "tags": [one(name, parameters) for name, parameters in tools],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    framed = [tag(begin, row, end) for begin, end in sections]
    if required:
        return structural_tag(one_of(*framed) if framed else row)
    return structural_tag(
        {
            "type": "triggered_tags",
            "triggers": list(triggers),
            "tags": framed or row["tags"],
            "at_least_one": False,
            "stop_after_first": not parallel,
            "excludes": list(excludes),
        }
    )

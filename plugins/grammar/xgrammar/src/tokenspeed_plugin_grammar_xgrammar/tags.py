"""Structural tags: every field read, every schema and expression in them in the form that is enforced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenspeed_plugin_grammar_xgrammar.ebnf import check_ebnf
from tokenspeed_plugin_grammar_xgrammar.keywords import child
from tokenspeed_plugin_grammar_xgrammar.limits import (
    MAX_DEPTH,
    MAX_TAG_PROPERTIES,
    MAX_TAG_SCHEMAS,
    MAX_WHITE_SPACE,
    refuse,
)
from tokenspeed_plugin_grammar_xgrammar.regex import render, search
from tokenspeed_plugin_grammar_xgrammar.regex_parser import parse
from tokenspeed_plugin_grammar_xgrammar.schema import Normaliser
from tokenspeed_plugin_grammar_xgrammar.xml_arguments import STYLES, arguments

__all__ = ["literals", "normalise_tag", "plain_regex"]

Format = dict[str, Any]


def plain_regex(text: str, path: str) -> str:
    """A regular expression that the whole text must match, as XGrammar takes it.

    Raises:
        GrammarError: it cannot be enforced, or is too large.
    """
    return render(search(parse(text, path), path, anywhere=False), path)


def normalise_tag(tag: Any) -> Format:
    """A structural tag in the form that is enforced.

    Raises:
        GrammarError: a field is unknown or malformed, or a schema or expression in it cannot be enforced.
    """
    if not isinstance(tag, dict) or tag.keys() != {"type", "format"} or tag["type"] != "structural_tag":
        raise refuse("$", 'a structural tag is {"type": "structural_tag", "format": {...}}')
    return {"type": "structural_tag", "format": _Work().format(tag["format"], "$.format", 0)}


def literals(format: Any) -> list[str | int]:
    """Every text that a normalised format writes literally, and every token that it names by text or id."""
    if isinstance(format, list):
        return [text for item in format for text in literals(item)]
    if not isinstance(format, dict):
        return []
    if format.get("type") == "json_schema":
        return []
    found = [
        text for key in ("value", "begin", "end", "separator", "token", "triggers") for text in _texts(format.get(key))
    ]
    return found + [text for value in format.values() for text in literals(value)]


def _texts(value: Any) -> list[str | int]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str | int)]


# What each field must be, and what it is called in errors.
_TEXT = (lambda value: isinstance(value, str), "a string")
_TEXTS = (
    lambda value: isinstance(value, list) and all(isinstance(item, str) and item for item in value),
    "a list of strings, none empty",
)
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_COUNT = (
    lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31),
    "a whole number",
)
_TOKEN = (
    lambda value: isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0),
    "a token's id or text",
)
_TOKENS = (lambda value: isinstance(value, list) and all(map(_TOKEN[0], value)), "a list of ids or texts of tokens")
_FORMAT = (lambda value: isinstance(value, dict), "a format")
_FORMATS = (
    lambda value: isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value),
    "a list of formats, not empty",
)
_BEGIN = (lambda value: isinstance(value, str | dict), "a string or a token")
_END = (
    lambda value: isinstance(value, str | dict) or (_TEXTS[0](value) and bool(value)),
    "a string, a list of strings, or a token",
)
_SCHEMA = (lambda value: isinstance(value, bool | dict), "a schema")

_Field = tuple[Callable[[Any], bool], str]
# (needed, optional) fields by type.
_FIELDS: dict[str, tuple[dict[str, _Field], dict[str, _Field]]] = {
    "const_string": ({"value": _TEXT}, {}),
    "json_schema": (
        {"json_schema": _SCHEMA},
        {"style": _TEXT, "max_whitespace_cnt": _COUNT, "any_order": _FLAG, "excludes": _TEXTS},
    ),
    "regex": ({"pattern": _TEXT}, {}),
    "grammar": ({"grammar": _TEXT}, {"syntax": _TEXT}),
    "any_text": ({}, {"excludes": _TEXTS, "max_chars": _COUNT, "max_tokens": _COUNT}),
    "token": ({"token": _TOKEN}, {}),
    "exclude_token": ({}, {"exclude_tokens": _TOKENS}),
    "any_tokens": ({}, {"exclude_tokens": _TOKENS, "max_tokens": _COUNT}),
    "sequence": ({"elements": _FORMATS}, {}),
    "or": ({"elements": _FORMATS}, {}),
    "optional": ({"content": _FORMAT}, {}),
    "star": ({"content": _FORMAT}, {}),
    "plus": ({"content": _FORMAT}, {}),
    "repeat": (
        {
            "min": _COUNT,
            "max": (lambda value: value == -1 or _COUNT[0](value), "a whole number or -1"),
            "content": _FORMAT,
        },
        {},
    ),
    "tag": ({"begin": _BEGIN, "content": _FORMAT, "end": _END}, {}),
    "triggered_tags": (
        {"triggers": _TEXTS, "tags": _FORMATS},
        {"at_least_one": _FLAG, "stop_after_first": _FLAG, "excludes": _TEXTS},
    ),
    "tags_with_separator": ({"tags": _FORMATS, "separator": _TEXT}, {"at_least_one": _FLAG, "stop_after_first": _FLAG}),
}


class _Work:
    """Counts what one structural tag holds in all."""

    def __init__(self) -> None:
        self.properties = self.schemas = 0

    def format(self, format: Any, path: str, depth: int) -> Format:
        """One format and those below it."""
        kind = self._check(format, path)
        if depth > MAX_DEPTH:
            raise refuse(path, f"formats nested more than {MAX_DEPTH} deep")
        if kind == "json_schema":
            return self._schema(format, path)
        if kind == "regex":
            return {"type": "regex", "pattern": plain_regex(format["pattern"], child(path, "pattern"))}
        if kind == "grammar":
            if format.get("syntax", "ebnf") != "ebnf":
                raise refuse(child(path, "syntax"), "only ebnf is known")
            check_ebnf(format["grammar"], child(path, "grammar"))
        if kind == "triggered_tags":
            self._check_triggers(format, path)
        if kind == "repeat" and (
            max(format["min"], format["max"]) > MAX_TAG_SCHEMAS or -1 < format["max"] < format["min"]
        ):
            raise refuse(path, f"repeats are bounded to {MAX_TAG_SCHEMAS}, min to max")
        out = dict(format)
        for key in ("content", "begin", "end"):
            if isinstance(format.get(key), dict):
                out[key] = self.format(format[key], child(path, key), depth + 1)
        for key in ("elements", "tags"):
            if key in format:
                out[key] = [
                    self.format(item, child(path, key, index), depth + 1) for index, item in enumerate(format[key])
                ]
                if key == "tags" and any(item["type"] != "tag" for item in out[key]):
                    raise refuse(child(path, key), "every format in it is of type tag")
        return out

    def _check(self, format: Any, path: str) -> str:
        kind = format.get("type") if isinstance(format, dict) else None
        if kind not in _FIELDS:
            raise refuse(child(path, "type"), f"{kind!r} is not known; known are {', '.join(_FIELDS)}")
        needed, optional = _FIELDS[kind]
        for key, value in format.items():
            rule = needed.get(key) or optional.get(key)
            if key != "type" and rule is None:
                raise refuse(child(path, key), f"is not a field of {kind}")
            if rule is not None and not rule[0](value):
                raise refuse(child(path, key), f"must be {rule[1]}")
        for key in needed.keys() - format.keys():
            raise refuse(path, f"{kind} needs the field {key}")
        self.schemas += 1
        if self.schemas > MAX_TAG_SCHEMAS:
            raise refuse(path, f"more than {MAX_TAG_SCHEMAS} formats")
        return str(kind)

    @staticmethod
    def _check_triggers(format: Mapping[str, Any], path: str) -> None:
        for index, tag in enumerate(format["tags"]):
            begin = tag.get("begin")
            if not isinstance(begin, str) or sum(begin.startswith(trigger) for trigger in format["triggers"]) != 1:
                raise refuse(
                    child(path, "tags", index, "begin"), "must be a string that begins with exactly one of the triggers"
                )

    def _schema(self, format: Mapping[str, Any], path: str) -> Format:
        style = format.get("style", "json")
        if format.get("any_order"):
            raise refuse(child(path, "any_order"), "gives up required and unique properties; leave it out")
        if format.get("excludes"):
            raise refuse(child(path, "excludes"), "is not enforced for strings with a pattern or length; leave it out")
        where = child(path, "json_schema")
        work = Normaliser(format["json_schema"], where, spelled=True)
        core = work.whole()
        self.properties += work.properties
        if self.properties > MAX_TAG_PROPERTIES:
            raise refuse(where, f"more than {MAX_TAG_PROPERTIES} properties in all schemas together")
        if style == "json":
            return {"type": "json_schema", "json_schema": core, "max_whitespace_cnt": MAX_WHITE_SPACE}
        if style not in STYLES:
            raise refuse(child(path, "style"), f"{style!r} is not known; known are json, {', '.join(STYLES)}")
        return arguments(core, style, where)

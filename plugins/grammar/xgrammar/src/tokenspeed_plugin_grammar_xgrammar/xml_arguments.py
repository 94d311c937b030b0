"""Arguments of a call in the XML-like forms of some models, as formats of a structural tag.

XGrammar has styles of its own for them. They let a string with a length or pattern run past its closing tag, and put white space around constants that a
reader keeps, so that what was generated would not be read as what the schema asks for. Here each argument is put together from its parts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenspeed_plugin_grammar_xgrammar import charsets
from tokenspeed_plugin_grammar_xgrammar.keywords import child
from tokenspeed_plugin_grammar_xgrammar.limits import MAX_WHITE_SPACE, refuse
from tokenspeed_plugin_grammar_xgrammar.regex import NOTHING, Chars, Repeat, render, restrict
from tokenspeed_plugin_grammar_xgrammar.regex_parser import parse
from tokenspeed_plugin_grammar_xgrammar.values import json_type

__all__ = ["STYLES", "arguments"]

Format = dict[str, Any]
Core = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Style:
    """How one argument is written: ``before`` its name, ``between`` name and value, and ``close``.

    ``lines``: line ends may stand around the value. ``typed``: ``between`` says whether the value is text (``{text}``: true or false), or its JSON type
    (``{kind}``).
    """

    before: str
    between: str
    close: str
    lines: bool = False
    typed: bool = False


STYLES = {
    "qwen_xml": Style("<parameter=", ">", "</parameter>", lines=True),
    "minimax_xml": Style('<parameter name="', '">', "</parameter>"),
    "deepseek_xml": Style('<｜DSML｜parameter name="', '" string="{text}">', "</｜DSML｜parameter>", typed=True),
    "kimi_k3_xml": Style('<|open|>argument key="', '" type="{kind}"<|sep|>', "<|close|>argument<|sep|>", typed=True),
    "glm_xml": Style("<arg_key>", "</arg_key>{line}<arg_value>", "</arg_value>"),
}

_LINE: Format = {"type": "optional", "content": {"type": "const_string", "value": "\n"}}
_NAME = re.compile(r"[^<>\"\s][^<>\"\n]*")
#: What a bounded string may hold: nothing that begins a tag, no line end.
_INLINE = charsets.intersect(charsets.TEXT, charsets.invert(charsets.merge([(0, 0x1F), (0x3C, 0x3C)])))
#: Any value that is not text, by its type as formats name it.
_OTHERS: dict[str, Core] = {
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "array": {"type": "array", "items": {}},
    "object": {"type": "object", "properties": {}, "required": [], "additionalProperties": {}},
}
_STARTS = {"array": "[", "object": "{", "integer": "-0123456789", "number": "-0123456789", "boolean": "tf", "null": "n"}


def arguments(core: Core, style: str, path: str) -> Format:
    """The arguments of an object's schema.

    Args:
        core: a normalised schema.
        style: of ``STYLES``.

    Raises:
        GrammarError: it is no object, or has what this form cannot write.
    """
    return _Arguments(STYLES[style], core.get("$defs", {}), path).whole(
        {key: value for key, value in core.items() if key != "$defs"}
    )


class _Arguments:
    def __init__(self, style: Style, definitions: dict[str, Core], path: str) -> None:
        self.style, self.definitions, self.path = style, definitions, path

    def resolved(self, core: Core) -> list[Core]:
        """``core`` as its alternatives, references followed."""
        while "$ref" in core:
            core = self.definitions[core["$ref"].removeprefix("#/$defs/")]
        return [part for option in core["anyOf"] for part in self.resolved(option)] if "anyOf" in core else [core]

    def whole(self, core: Core) -> Format:
        """All arguments, by alternatives of the schema."""
        return _one_of([self.object(option) for option in self.resolved(core)])

    def object(self, core: Core) -> Format:
        """The arguments of one object."""
        if core and core.get("type") != "object":
            raise refuse(self.path, "the arguments of a call are an object")
        if "minProperties" in core or "maxProperties" in core:
            raise refuse(self.path, "minProperties and maxProperties cannot be enforced in this tool format")
        elements: list[Format] = [_LINE]
        for name, inner in core.get("properties", {}).items():
            if not _NAME.fullmatch(name):
                raise refuse(child(self.path, "properties", name), "this name cannot be written in this tool format")
            one = _sequence(
                [
                    self.argument({"type": "const_string", "value": name}, inner, child(self.path, "properties", name)),
                    _LINE,
                ]
            )
            elements.append(one if name in core["required"] else {"type": "optional", "content": one})
        free = core.get("additionalProperties", {})
        if free is not False and not core.get("properties"):
            pattern = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"
            if "propertyNames" in core:
                tree = restrict(
                    parse(core["propertyNames"]["pattern"], self.path), charsets.merge([*charsets.WORD, (0x2D, 0x2E)])
                )
                pattern = render(tree, child(self.path, "propertyNames"))
            one = self.argument({"type": "regex", "pattern": pattern}, free, child(self.path, "additionalProperties"))
            elements.append({"type": "star", "content": _sequence([one, _LINE])})
        return _sequence(elements)

    def argument(self, name: Format, core: Core, path: str) -> Format:
        """One argument, up to its closing tag."""
        style = self.style
        by_between: dict[str, list[Format]] = {}
        for kind, value in self.values(core, path):
            between = style.between.replace("{text}", "true" if kind == "string" else "false").replace("{kind}", kind)
            by_between.setdefault(between, []).append(value)
        forms = []
        for between, values in by_between.items():
            head, _, tail = between.partition("{line}")
            middle = [_const(head), _LINE, _const(tail)] if tail else [_const(head)]
            forms.append(_sequence([_const(style.before), name, *middle, _one_of(values)]))
        return _one_of(forms)

    def values(self, core: Core, path: str) -> list[tuple[str, Format]]:
        """Formats of the values with their JSON types, texts first, each with the closing tag."""
        options = self.resolved(core)
        if {} in options:
            text = [("string", self.closed({"type": "any_text"}))]
            if not self.style.typed:
                return text
            return text + [(kind, self.json(any_of_it)) for kind, any_of_it in _OTHERS.items()]
        texts: list[tuple[str, Format]] = []
        others: list[tuple[str, Format]] = []
        taken = "".join(
            _STARTS[option["type"]] for option in options if len(option) > 1 and option.get("type") in _STARTS
        )
        for option in options:
            if "enum" in option:
                for value in option["enum"]:
                    if not isinstance(value, str):
                        written = self.closed(_const(json.dumps(value, ensure_ascii=False)), lines=True)
                        others.append((_kind(json_type(value)), written))
                    elif self.style.close not in value and value.strip("\n") == value:
                        texts.append(("string", self.closed(_const(value), lines=True)))
            elif option.get("type") == "string":
                texts.append(("string", self.text(option, taken, path)))
            else:
                others.append((_kind(option["type"]), self.json(option)))
        if not texts and not others:
            raise refuse(path, "none of its values can be written in this tool format")
        return texts + others

    def text(self, core: Core, taken: str, path: str) -> Format:
        """A string's characters as they are."""
        if core.keys() == {"type"} and not taken:
            return self.closed({"type": "any_text"})
        if "pattern" in core:
            tree = restrict(parse(core["pattern"], path), _INLINE)
            if tree == NOTHING:
                raise refuse(child(path, "pattern"), "matches no text that can be written in this tool format")
        else:
            tree = Repeat(Chars(_INLINE), core.get("minLength", 0), core.get("maxLength"))
        if not taken:
            return self.closed({"type": "regex", "pattern": render(tree, path, limited="pattern" in core)}, lines=True)
        if len(core) > 1:
            raise refuse(
                path, "a string with a pattern or length beside another type cannot be told from it in this tool format"
            )
        # The first character tells the string from the JSON that its alternatives would be.
        first = charsets.intersect(
            _INLINE, charsets.invert(charsets.merge((ord(char), ord(char)) for char in taken + '" '))
        )
        return self.closed(
            {"type": "regex", "pattern": charsets.render(first) + charsets.render(_INLINE) + "*"}, lines=True
        )

    def json(self, core: Core) -> Format:
        """A value as JSON."""
        schema = {**core, "$defs": self.definitions} if self.definitions else core
        return self.closed(
            {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITE_SPACE}, lines=True
        )

    def closed(self, content: Format, *, lines: bool = False) -> Format:
        """``content`` up to the closing tag; ``lines``: with the line ends that belong to the markup."""
        if lines and self.style.lines:
            content = _sequence([_LINE, content, _LINE])
        return {"type": "tag", "begin": "", "content": content, "end": self.style.close}


def _kind(kind: str) -> str:
    return "number" if kind == "integer" else kind


def _const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(elements: list[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _one_of(elements: list[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}

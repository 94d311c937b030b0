"""Random texts of a structural tag, written from the tag itself: what a grammar backend would let through, without one.

The conformance suites of parsers feed them to the parser whose tag it is. Strings and free text like to hold what could confuse it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from tokenspeed.testing.tag_tools import Draw

__all__ = ["TagTexts"]

Format = Mapping[str, Any]

#: Opening and closing of an argument by style, and what may stand around a text.
_STYLES = {
    "qwen_xml": ("<parameter={key}>", "</parameter>", "\n"),
    "minimax_xml": ('<parameter name="{key}">', "</parameter>", ""),
    "deepseek_xml": ('<｜DSML｜parameter name="{key}" string="{is_text}">', "</｜DSML｜parameter>", ""),
    "glm_xml": ("<arg_key>{key}</arg_key>{line}<arg_value>", "</arg_value>", ""),
    "kimi_k3_xml": ('<|open|>argument key="{key}" type="{kind}"<|sep|>', "<|close|>argument<|sep|>", ""),
}
_WORDS = (
    "a",
    "b c",
    "",
    "null",
    "1",
    "true",
    "ü 日",
    '"',
    "\\",
    "'",
    "}",
    "]",
    ")",
    "{",
    "[",
    "<",
    "</",
    "&amp;",
    "\n",
    " ",
    ", ",
    ": ",
)
_MANY = 3


class TagTexts:
    """Writes one text of a structural tag.

    Args:
        rng: chooses.
        draw: takes an example of a strategy.
        nasty: texts that free text and strings like to hold, beside others.

    Attributes:
        values: the JSON values that were written for schemas, in order.
        spans: ``(begin, end)`` of what was written for tokens.
    """

    def __init__(self, rng: random.Random, draw: Draw, nasty: Sequence[str]) -> None:
        self._rng, self._draw = rng, draw
        self._words = (*_WORDS, *nasty, *(text[: len(text) // 2] for text in nasty))
        self._out: list[str] = []
        self._size = 0
        self._ends: list[str] = []  # what free text must not hold here
        self._drawn: set[str] = set()
        self.values: list[Any] = []
        self.spans: list[tuple[int, int]] = []

    def text(self, format: Format) -> str:
        """A text of ``format``, which is a tag's or a tag.

        Raises:
            NotImplementedError: it has a part that this cannot write, ``grammar`` for example.
        """
        self._write(format["format"] if format["type"] == "structural_tag" else format)
        return "".join(self._out)

    def _put(self, text: str) -> None:
        self._out.append(text)
        self._size += len(text)

    def _write(self, format: Format) -> None:
        writer = getattr(self, f"_{format['type']}", None)
        if writer is None:
            raise NotImplementedError(
                f"the suite writes no texts of {format['type']!r}; describe the calls with other parts"
            )
        writer(format)

    # -- parts, by the name of their type

    def _const_string(self, format: Format) -> None:
        self._put(format["value"])

    def _token(self, format: Format) -> None:
        if not isinstance(format["token"], str):
            raise NotImplementedError("the suite writes no tokens by id; name them by their text")
        self.spans.append((self._size, self._size + len(format["token"])))
        self._put(format["token"])

    def _regex(self, format: Format) -> None:
        pattern = re.compile(format["pattern"], re.ASCII)
        text = self._draw(st.from_regex(pattern, fullmatch=True))
        other = f"{text}{len(self._drawn)}"
        if text in self._drawn and pattern.fullmatch(other):  # names that are drawn should differ
            text = other
        self._drawn.add(text)
        self._put(text)

    def _any_text(self, format: Format) -> None:
        without = [*format.get("excludes", ()), *self._ends]
        text = self._string(without)
        most = format.get("max_chars")
        self._put(text if most is None else text[:most])

    def _json_schema(self, format: Format) -> None:
        style, schema = format.get("style", "json"), format["json_schema"]
        if style == "json":
            value = self._value(schema, schema)
            self.values.append(value)
            self._put(self._json(value))
            return
        self._arguments(schema, style)

    def _sequence(self, format: Format) -> None:
        for element in format["elements"]:
            self._write(element)

    def _or(self, format: Format) -> None:
        self._write(self._rng.choice(format["elements"]))

    def _optional(self, format: Format) -> None:
        self._repeated(format["content"], 0, 1)

    def _star(self, format: Format) -> None:
        self._repeated(format["content"], 0, _MANY)

    def _plus(self, format: Format) -> None:
        self._repeated(format["content"], 1, _MANY)

    def _repeat(self, format: Format) -> None:
        least, most = format["min"], format["max"]
        self._repeated(format["content"], least, least + _MANY if most < 0 else min(most, least + _MANY))

    def _repeated(self, content: Format, least: int, most: int) -> None:
        for _ in range(self._rng.randint(least, most)):
            self._write(content)

    def _tag(self, format: Format) -> None:
        end = self._rng.choice(format["end"]) if isinstance(format["end"], list) else format["end"]
        for part, is_end in ((format["begin"], False), (end, True)):
            if is_end:
                text = end if isinstance(end, str) else end.get("token", "")
                self._ends.append(text)
                self._write(format["content"])
                self._ends.pop()
            if isinstance(part, str):
                self._put(part)
            else:
                self._write(part)

    def _tags_with_separator(self, format: Format) -> None:
        most = 1 if format.get("stop_after_first") else _MANY
        for at in range(self._rng.randint(int(format.get("at_least_one", False)), most)):
            self._put(format["separator"] if at else "")
            self._write(self._rng.choice(format["tags"]))

    def _triggered_tags(self, format: Format) -> None:
        first = format.get("at_least_one", False)
        free = {"excludes": [*format["triggers"], *format.get("excludes", ())]}
        for at in range(self._rng.randint(int(first), _MANY)):
            if at or not first:
                self._any_text(free)
            self._write(self._rng.choice(format["tags"]))
            if format.get("stop_after_first"):
                return
        self._any_text(free)

    # -- values

    def _string(self, without: Sequence[str]) -> str:
        """Text that holds none of ``without``."""
        text = "".join(self._rng.choices(self._words, k=self._rng.randrange(5)))
        for _ in range(20):
            held = [part for part in without if part and part in text]
            if not held:
                return text
            for part in held:
                text = text.replace(part, "")
        return ""

    def _json(self, value: Any) -> str:
        separators = self._rng.choice(((", ", ": "), (",", ":"), ("\n,", ":\n")))
        return json.dumps(value, ensure_ascii=self._rng.random() < 0.3, separators=separators)

    def _value(self, schema: Any, root: Any) -> Any:
        rng = self._rng
        if schema is True or not schema or schema.keys() <= {"$defs", "definitions"}:
            return rng.choice((None, True, 7, -1.5, self._string(()), [1, "x"], {"a": {}}))
        if "$ref" in schema:
            target = root
            for part in schema["$ref"].split("/")[1:]:
                target = target[part]
            return self._value(target, root)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._value(rng.choice(schema[keyword]), root)
        kind = rng.choice(schema["type"]) if isinstance(schema["type"], list) else schema["type"]
        if kind == "object":
            return self._object(schema, lambda inner: self._value(inner, root))
        if kind == "array":
            return [self._value(schema.get("items", True), root) for _ in range(rng.randrange(3))]
        if kind == "string":
            return self._string(())
        if kind == "integer":
            return rng.choice((0, -3, 12, 2**40))
        return rng.choice({"number": (0, -1.5, 12.25, 1000), "boolean": (True, False), "null": (None,)}[kind])

    def _object(self, schema: Any, value: Callable[[Any], Any]) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        found = {key: value(inner) for key, inner in properties.items() if key in required or self._rng.random() < 0.5}
        if not properties and schema.get("additionalProperties", True):
            found = {f"free_{at}": value(True) for at in range(self._rng.randrange(3))}
        return found

    def _arguments(self, schema: Any, style: str) -> None:
        """An object's members as the arguments of an XML-like form."""
        if style not in _STYLES:
            raise NotImplementedError(f"the suite knows no style {style!r}; it knows {', '.join(_STYLES)}")
        opening, closing, line = _STYLES[style]

        def value(inner: Any) -> Any:  # undeclared ones are text
            found = self._string((closing,)) if inner is True else self._value(inner, schema)
            while isinstance(found, str) and (closing in found or found.strip("\n") != found):
                found = found.replace(closing, "").strip("\n")
            return found

        found = self._object(schema, value)
        self.values.append(found)
        for key, item in found.items():
            is_text = isinstance(item, str)
            between = self._rng.choice((line, ""))
            self._put(
                opening.format(
                    key=key, is_text=str(is_text).lower(), kind=_kind(item), line=self._rng.choice(("\n", ""))
                )
            )
            self._put(f"{between}{item if is_text else self._json(item)}{between}{closing}")
            self._put("" if style == "kimi_k3_xml" else self._rng.choice(("\n", "")))


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    return {str: "string", int: "number", float: "number", list: "array", dict: "object"}[type(value)]

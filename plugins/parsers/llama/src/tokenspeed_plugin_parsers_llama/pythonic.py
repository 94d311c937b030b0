"""Llama 4 and Llama 3.2 tool calls: a Python list of calls with literal keyword arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.parsing import (
    JsonStream,
    LiteralStream,
    Markers,
    Progress,
    StateMachine,
    partial,
    quote,
    structural,
)
from tokenspeed_plugin_parsers_llama.keywords import KEYWORD, keywords

__all__ = ["PythonicToolParser"]

_AROUND = ("<|python_start|>", "<|python_end|>", "<|eom|>", "<|eot|>", "<|eom_id|>", "<|eot_id|>")
_SPACE = r"[ \t\r\n]{0,16}+"
_NAME = r"[^\W\d][\w.-]{0,127}+"
_KEYWORD = r"[^\W\d]\w{0,127}+"
# A list that begins with a call: "[name(" and then ")" or "keyword=", or as much of it as is there.
_KEYWORD_HEAD = rf"{_KEYWORD}{_SPACE}(?:\Z|=(?:\Z|[^=]))"
_HEAD = re.compile(
    rf"\[(?={_SPACE}(?:\Z|{_NAME}(?:\Z|\({_SPACE}(?:\Z|\)|{_KEYWORD_HEAD}))))|" + "|".join(map(partial, _AROUND))
)
_WHOLE_HEAD = re.compile(rf"\[{_SPACE}{_NAME}\({_SPACE}(?:\)|{_KEYWORD}{_SPACE}=[^=])")
_CALL = re.compile(rf"{_NAME}\(")
_ARGUMENT = re.compile(rf"{_KEYWORD}{_SPACE}=(?!=)")
_BLANK = re.compile(r"[ \t\r\n]*")
# Only a short cut: a keyword and a simple value that are there as a whole, with what follows.
_FLAT = re.compile(
    rf"""({_KEYWORD}){_SPACE}=[ ]?('[^'\\]*+'|"[^"\\]*+"|-?(?:0|[1-9][0-9]{{0,30}}+)(?:\.[0-9]{{1,30}}+)?|True|False|None){_SPACE}(?=[,)])"""
)
_WORDS = {"True": "true", "False": "false", "None": "null"}
#: Longest call name or keyword with white space that an element may have.
_MAX_TOKEN = 160


class PythonicToolParser(StateMachine):
    """States: text, between calls, arguments of a call, value, behind a value, behind a call.

    A list is one of calls if it stands at the beginning or behind white space and begins with ``name(keyword=`` or ``name()``. Values must be
    literals; nothing is evaluated. A call is complete when a comma or the end of the list follows it; one that breaks becomes content.

    Where calls are constrained, a list is one of calls if it begins with the name of a declared function, and nothing else is; values are JSON, or Python's
    words for truth values and nothing.
    """

    needs_special_tokens = True

    def __init__(self, ctx: ParserContext) -> None:
        super().__init__(ctx)
        self._previous = ""  # the character before the text that is left
        self._raw: list[str] = []  # text of the call so far, should it become content
        self._keys: set[str] = set()
        self._skip = False  # a keyword that was given before
        self._value: LiteralStream | JsonStream | None = (
            None  # the one being read; which kind its first character tells
        )
        self._exact: Markers | None = None
        if ctx.constrained:
            self._exact = Markers((*map(_head, _declared(ctx.tools)), *_AROUND))

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        """One list, or text with lists in it; the markers of Llama 4 may stand around a list."""
        places: dict[str, int] = {}
        for at, name in enumerate(_declared(tools)):
            places.setdefault(name, at)
        called = structural.functions(tools, names, keys=KEYWORD)
        calls = {
            "type": "tags_with_separator",
            "tags": [_call_tag(name, parameters, f"tools[{places[name]}].function") for name, parameters in called],
            "separator": ", ",
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        around = [{"type": "optional", "content": structural.const(marker)} for marker in _AROUND[:2]]
        row = structural.sequence(around[0], structural.const("["), calls, structural.const("]"), around[1])
        if required:
            return structural.structural_tag(row)
        text = structural.text(*map(_head, places))
        if not parallel:
            return structural.structural_tag(structural.sequence(text, {"type": "optional", "content": row}))
        return structural.structural_tag(
            structural.sequence({"type": "star", "content": structural.sequence(text, row)}, text)
        )

    def on_text(self) -> bool:
        if self._exact is not None:
            return self._exact_text(self._exact)
        scan = self.scan
        match = _HEAD.search(scan.text, scan.pos)
        begin = match.start() if match else len(scan.text)
        self._tell(scan.text[scan.pos : begin])
        scan.pos = begin
        if match is None:
            return False
        if match.group() in _AROUND:
            self.out.markup()
            scan.pos, self._previous = match.end(), ""
            return True
        is_list = match.group() == "[" and not self._previous.strip()
        if is_list and _WHOLE_HEAD.match(scan.text, begin):
            scan.pos += 1
            self._raw, self.state = ["["], self.on_list
            return True
        if scan.closed or (match.group() == "[" and not is_list):
            self._tell(scan.text[begin : match.end()])
            scan.pos = match.end()
            return True
        return False

    def _exact_text(self, heads: Markers) -> bool:
        """As ``on_text``, where what begins a list is known."""
        text, marker = self.scan.until(heads)
        self._tell(text)
        if marker in _AROUND:
            self.out.markup()
        elif marker:
            self.scan.pos -= len(marker) - 1
            self._raw, self.state = ["["], self.on_list
        return bool(marker)

    def _tell(self, text: str) -> None:
        if text:
            self.out.text(text)
            self._previous = text[-1]

    def _blank(self) -> str:
        """Skip white space; the next character, or nothing."""
        char = self.scan.peek()
        if char and char in " \t\r\n":
            self._raw.append(self.scan.match(_BLANK))
            char = self.scan.peek()
        return char

    def _token(self, pattern: re.Pattern[str]) -> str | None:
        """A short token: its text, nothing if there is none here, ``None`` while it may still come."""
        scan = self.scan
        token = scan.match(pattern)
        if token:
            # What follows decides whether "=" is one or the first half of "==".
            if scan.empty and not scan.closed and token.endswith("="):
                scan.pos -= len(token)
                return None
            self._raw.append(token)
            return token
        return (
            "" if scan.closed or len(scan.text) - scan.pos > _MAX_TOKEN or not _may_grow(scan.text, scan.pos) else None
        )

    def on_list(self) -> bool:
        """Before a call, or before the end of the list behind a comma."""
        char = self._blank()
        if not char:
            return False
        if char == "]":
            return self._end_list()
        token = self._token(_CALL)
        if token is None:
            return False
        if not token:
            return self._to_content()
        self.out.begin(token[:-1])
        self._keys = set()
        self.state = self.on_arguments
        return True

    def on_arguments(self) -> bool:
        char = self._blank()
        if not char:
            return False
        if char == ")":
            self._raw.append(")")
            self.scan.pos += 1
            self.state = self.on_call_end
            return True
        if flat := self.scan.find(_FLAT):
            self._raw.append(flat[0])
            self._begin_argument(flat[1])
            if not self._skip:
                self.out.arguments(quote(flat[2][1:-1]) if flat[2][0] in "'\"" else _WORDS.get(flat[2], flat[2]))
            return self.on_value_end()
        token = self._token(_ARGUMENT)
        if token is None:
            return False
        if not token:
            return self._to_content()
        self._begin_argument(token[:-1].strip())
        self._value, self.state = None, self.on_value
        return True

    def _begin_argument(self, key: str) -> None:
        self._skip = key in self._keys
        if not self._skip:
            self.out.arguments(("{" if not self._keys else ", ") + quote(key) + ": ")
            self._keys.add(key)

    def on_value(self) -> bool:
        begin = self.scan.pos
        if self.scan.empty:
            return False
        if self._value is None:
            json = self.ctx.constrained and self.scan.peek() not in "TFN"
            self._value = JsonStream() if json else LiteralStream()
        told, self.scan.pos = self._value.feed(self.scan.text, begin)
        self._raw.append(self.scan.text[begin : self.scan.pos])
        if not self._skip:
            self.out.arguments(told)
        if self._value.progress is Progress.FAILED:
            return self._to_content()
        if self._value.progress is Progress.OPEN:
            return False
        return self.on_value_end()

    def on_value_end(self) -> bool:
        self.state = self.on_value_end
        char = self._blank()
        if not char:
            return False
        if char == ",":
            self._raw.append(",")
            self.scan.pos += 1
        elif char != ")":
            return self._to_content()
        self.state = self.on_arguments
        return True

    def on_call_end(self) -> bool:
        char = self._blank()
        if not char:
            return False
        if char not in ",]":
            return self._to_content()
        self.out.arguments("}" if self._keys else "{}")
        self._raw = []
        if char == "]":
            return self._end_list()
        self.scan.pos += 1
        self.state = self.on_list
        return True

    def _end_list(self) -> bool:
        self.scan.pos += 1
        self.out.markup()
        self._previous, self.state = "", self.on_text
        return True

    def _to_content(self) -> bool:
        self._tell("".join(self._raw))
        self._raw = []
        self.state = self.on_text
        return True


def _declared(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [tool.get("function", tool)["name"] for tool in tools]


def _head(name: str) -> str:
    """What begins a list whose first call is one of this function."""
    return f"[{name}("


def _call_tag(name: str, parameters: structural.Format, param: str) -> structural.Format:
    if not re.fullmatch(_NAME, name):
        raise GrammarError(
            f"{param}.name: calls of {name[:40]!r} cannot be written in Python's form; begin it with a letter",
            param=f"{param}.name",
        )
    inside = keywords(parameters, f"{param}.parameters")
    if inside is None:
        return structural.tag(f"{name}(", structural.const(")"), "")
    return structural.tag(f"{name}(", inside, ")")


_GROWING = re.compile(rf"(?:{_NAME}|{_KEYWORD}{_SPACE})\Z")


def _may_grow(text: str, at: int) -> bool:
    """Whether what is left is the beginning of a name or a keyword."""
    return _GROWING.match(text, at) is not None

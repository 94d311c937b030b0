"""Llama 4 and Llama 3.2 tool calls: a Python list of calls with literal keyword arguments."""

from __future__ import annotations

import re

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.parsing import LiteralStream, Progress, StateMachine, partial, quote

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
    """

    needs_special_tokens = True

    def __init__(self, ctx: ParserContext) -> None:
        super().__init__(ctx)
        self._previous = ""  # the character before the text that is left
        self._raw: list[str] = []  # text of the call so far, should it become content
        self._keys: set[str] = set()
        self._skip = False  # a keyword that was given before
        self._value = LiteralStream()

    def on_text(self) -> bool:
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
        self._value, self.state = LiteralStream(), self.on_value
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


_GROWING = re.compile(rf"(?:{_NAME}|{_KEYWORD}{_SPACE})\Z")


def _may_grow(text: str, at: int) -> bool:
    """Whether what is left is the beginning of a name or a keyword."""
    return _GROWING.match(text, at) is not None

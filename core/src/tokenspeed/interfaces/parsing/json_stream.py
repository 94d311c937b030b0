"""One JSON value, checked and copied as it arrives.

The grammar is RFC 8259, tracked by a stack of open containers and one expectation, so every character is looked at once. Two things are added: a raw
control character inside a string is escaped instead of refused (models write real line breaks there, and clients refuse them), and nesting is limited.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from json.encoder import encode_basestring as quote

__all__ = ["MAX_DEPTH", "JsonStream", "Progress", "is_complete", "quote"]

#: Deepest nesting of arrays and objects; common JSON readers fail at 1,000, some at 500.
MAX_DEPTH = 256

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_DIGITS = re.compile(r"[0-9]*")
# Whole scalar elements of an array with their commas; only a short cut, the states below do the same.
_ELEMENTS = re.compile(r'(?:[ \t\r\n]*+(?:"[^"\\\x00-\x1f]*+"|-?+(?:0|[1-9][0-9]*+)|true|false|null)[ \t\r\n]*+,)++')
_CONTROL = {chr(code): f"\\u{code:04x}" for code in range(32)} | {
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    "\b": "\\b",
    "\f": "\\f",
}
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}

# Number states: what each kind of character leads to. D is 1 to 9.
_NUMBER: dict[str, dict[str, str]] = {
    "-": {"0": "0", "D": "i"},
    "0": {".": ".", "e": "e"},
    "i": {"0": "i", "D": "i", ".": ".", "e": "e"},
    ".": {"0": "f", "D": "f"},
    "f": {"0": "f", "D": "f", "e": "e"},
    "e": {"0": "x", "D": "x", "+": "s", "-": "s"},
    "s": {"0": "x", "D": "x"},
    "x": {"0": "x", "D": "x"},
}
_NUMBER_ENDS = frozenset("0ifx")
_NUMBER_KINDS = {"0": "0", ".": ".", "e": "e", "E": "e", "+": "+", "-": "-"} | dict.fromkeys("123456789", "D")


class Progress(Enum):
    """How far one value is."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"


class JsonStream:
    """Copies one JSON value out of a text that arrives in pieces.

    Attributes:
        progress: ``FAILED`` as soon as the text can no longer become a JSON value.
    """

    __slots__ = ("_in_key", "_left", "_number", "_out", "_stack", "_state", "progress")

    def __init__(self) -> None:
        self.progress = Progress.OPEN
        self._stack: list[str] = []  # the closing character of each open container
        self._state: Callable[[str, int], int] = self._value
        self._in_key = False
        self._number = ""
        self._left = ""  # characters that must follow: of a word, or hexadecimal digits as "h"
        self._out: list[str] = []

    def feed(self, text: str, begin: int = 0) -> tuple[str, int]:
        """Read on at ``text[begin]``: ``(what was copied, offset of the first character that does not belong to the value)``.

        On failure the offset is that of the offending character.
        """
        at, size = begin, len(text)
        self._out = []
        copied = begin
        while at < size and self.progress is Progress.OPEN:
            after = self._state(text, at)
            if after < 0:  # a control character in a string
                self._out.append(text[copied : -after - 1])
                self._out.append(_CONTROL[text[-after - 1]])
                after = copied = -after
            at = after
        self._out.append(text[copied:at])
        return "".join(self._out), at

    def finish(self) -> None:
        """The text is at its end: a number may be complete now, anything else that is open stays open."""
        if (
            self.progress is Progress.OPEN
            and self._state == self._digits
            and not self._stack
            and self._number in _NUMBER_ENDS
        ):
            self.progress = Progress.DONE

    def _fail(self, at: int) -> int:
        self.progress = Progress.FAILED
        return at

    def _end(self, at: int) -> int:
        """A value ends at ``at``."""
        if self._stack:
            self._state = self._after
        else:
            self.progress = Progress.DONE
        return at

    def _space(self, text: str, at: int) -> int:
        return _SPACE.match(text, at).end() if text[at] in " \t\r\n" else at  # type: ignore[union-attr]

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self._in_key, self._state = False, self._string
        elif char in "{[":
            if len(self._stack) == MAX_DEPTH:
                return self._fail(at)
            self._stack.append("}" if char == "{" else "]")
            self._state = self._first_key if char == "{" else self._first_element
        elif char in _WORDS:
            self._left, self._state = _WORDS[char], self._word
        elif char == "-" or char in "0123456789":
            self._number, self._state = ("i" if char in "123456789" else char), self._digits
        elif char in " \t\r\n":
            return self._space(text, at)
        else:
            return self._fail(at)
        return at + 1

    def _element(self, text: str, at: int) -> int:
        """A value after a comma of an array."""
        match = _ELEMENTS.match(text, at)
        if match is None:
            return self._value(text, at)
        self._state = self._element
        return match.end()

    def _first_element(self, text: str, at: int) -> int:
        if text[at] == "]":
            self._stack.pop()
            return self._end(at + 1)
        return self._element(text, at)

    def _first_key(self, text: str, at: int) -> int:
        if text[at] == "}":
            self._stack.pop()
            return self._end(at + 1)
        return self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        if text[at] == '"':
            self._in_key, self._state = True, self._string
            return at + 1
        after = self._space(text, at)
        return after if after > at else self._fail(at)

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._state = self._value
            return at + 1
        after = self._space(text, at)
        return after if after > at else self._fail(at)

    def _after(self, text: str, at: int) -> int:
        """After a value inside a container."""
        char = text[at]
        if char == ",":
            self._state = self._key if self._stack[-1] == "}" else self._element
            return at + 1
        if char == self._stack[-1]:
            self._stack.pop()
            return self._end(at + 1)
        after = self._space(text, at)
        return after if after > at else self._fail(at)

    def _string(self, text: str, at: int) -> int:
        at = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        char = text[at]
        if char == '"':
            if self._in_key:
                self._state = self._colon
                return at + 1
            return self._end(at + 1)
        if char == "\\":
            self._state = self._escape
            return at + 1
        return -(at + 1)

    def _escape(self, text: str, at: int) -> int:
        char = text[at]
        if char in '"\\/bfnrt':
            self._state = self._string
        elif char == "u":
            self._left, self._state = "hhhh", self._hexadecimal
        else:
            return self._fail(at)
        return at + 1

    def _hexadecimal(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._fail(at)
        self._left = self._left[1:]
        if not self._left:
            self._state = self._string
        return at + 1

    def _word(self, text: str, at: int) -> int:
        if text[at] != self._left[0]:
            return self._fail(at)
        self._left = self._left[1:]
        return at + 1 if self._left else self._end(at + 1)

    def _digits(self, text: str, at: int) -> int:
        kind = _NUMBER_KINDS.get(text[at], "")
        state = _NUMBER[self._number].get(kind)
        if state is not None:
            self._number = state
            return _DIGITS.match(text, at + 1).end() if state in "ifx" else at + 1  # type: ignore[union-attr]
        return self._end(at) if self._number in _NUMBER_ENDS else self._fail(at)


def is_complete(arguments: str) -> bool:
    """Whether ``arguments`` is one whole JSON object: the call that they belong to is finished.

    Unlike ``json.loads`` it takes numbers of any length.
    """
    if not arguments.startswith("{"):
        return False
    stream = JsonStream()
    _, end = stream.feed(arguments)
    return stream.progress is Progress.DONE and end == len(arguments)

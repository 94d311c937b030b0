"""One call written as a JSON object, ``{"name": .., "arguments": {..}}``, told while it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tokenspeed.interfaces.parsing.json_stream import JsonStream, Progress

__all__ = ["JsonCall"]

_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r'"([^"\\\x00-\x1f]*+)"')  # a string without escapes that is there as a whole
_ARGUMENT_KEYS = ("arguments", "parameters")
_HEAD_KEYS = ("name", "id", "type")


class JsonCall:
    """Reads a call object.

    Keys may come in any order; unknown ones are ignored, of a repeated one the first counts; missing or null arguments are ``{}``. The last brace of
    the arguments is told only when the call object itself is closed, so that a call which breaks in between never looks complete.

    Args:
        strict: the object stands in plain text: before its arguments only a name, an id and a type, each a string, make it a call, and it must have
            arguments. Anything else is somebody's JSON and fails at once.

    Attributes:
        progress: of the whole object.
        name: the function's name, as soon as it is known; never empty.
        id: the call's id if one came before the call was begun.
    """

    __slots__ = (
        "_arguments",
        "_key",
        "_read",
        "_state",
        "_strict",
        "_text",
        "_told",
        "_value",
        "id",
        "name",
        "progress",
    )

    def __init__(self, *, strict: bool = False) -> None:
        self.progress = Progress.OPEN
        self.name: str | None = None
        self.id: str | None = None
        self._strict = strict
        self._state: Callable[[str, int], int] = self._open
        self._key = ""
        self._value = JsonStream()  # the key or value being read
        self._text: list[str] = []  # its text, unless it is the arguments
        self._arguments: list[str] = []  # not told yet
        self._read = False  # arguments were seen
        self._told = False  # the first piece of them was told

    @property
    def begun(self) -> bool:
        """This is a call: its name is known, and its arguments have begun or the object is closed."""
        return self.name is not None and (self._read or self.progress is Progress.DONE)

    def feed(self, text: str, begin: int = 0) -> tuple[str, int]:
        """Read on at ``text[begin]``: ``(arguments that can be told now, offset behind what belongs to the object)``."""
        at, size = begin, len(text)
        while at < size and self.progress is Progress.OPEN:
            at = self._state(text, at)
        if not self.begun:
            return "", at
        told = "".join(self._arguments)
        self._arguments.clear()
        if self.progress is Progress.DONE:
            told += "}" if self._told or told else "{}"
        self._told = self._told or bool(told)
        return told, at

    def _fail(self, at: int) -> int:
        self.progress = Progress.FAILED
        return at

    def _space(self, text: str, at: int) -> int:
        """Skip white space; fail if there is none."""
        after = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        return after if after > at else self._fail(at)

    def _open(self, text: str, at: int) -> int:
        if text[at] != "{":
            return self._fail(at)
        self._state = self._first_key
        return at + 1

    def _close(self, at: int) -> int:
        if self.name is None or (self._strict and not self._read):
            return self._fail(at)
        self.progress = Progress.DONE
        return at + 1

    def _first_key(self, text: str, at: int) -> int:
        return self._close(at) if text[at] == "}" else self._next_key(text, at)

    def _next_key(self, text: str, at: int) -> int:
        if text[at] != '"':
            return self._space(text, at)
        if whole := _WORD.match(text, at):
            return self._take_key(whole[1], whole.end())
        self._begin_value(self._in_key)
        return at

    def _take_key(self, key: str, at: int) -> int:
        if self._strict and not self._read and not self._may_precede(key):
            return self._fail(at)
        self._key, self._state = key, self._colon
        return at

    def _begin_value(self, state: Callable[[str, int], int]) -> None:
        self._value, self._text, self._state = JsonStream(), [], state

    def _in_key(self, text: str, at: int) -> int:
        piece, at = self._value.feed(text, at)
        self._text.append(piece)
        if self._value.progress is Progress.FAILED:
            return self._fail(at)
        if self._value.progress is Progress.DONE:
            return self._take_key(json.loads("".join(self._text)), at)
        return at

    def _may_precede(self, key: str) -> bool:
        return key in _HEAD_KEYS or (key in _ARGUMENT_KEYS and self.name is not None)

    def _colon(self, text: str, at: int) -> int:
        if text[at] != ":":
            return self._space(text, at)
        self._state = self._before_value
        return at + 1

    def _before_value(self, text: str, at: int) -> int:
        char = text[at]
        if char in " \t\r\n":
            return self._space(text, at)
        if self._key in _ARGUMENT_KEYS and not self._read:
            if char not in "{n":
                return self._fail(at)
            if char == "{":
                self._begin_value(self._in_arguments)
                self._read = True
                return at
        elif (self._key == "name" and self.name is None and char != '"') or (
            self._strict and not self._read and char != '"'
        ):
            return self._fail(at)
        if char == '"' and (whole := _WORD.match(text, at)):
            self._text, self._state = [whole[0]], self._after
            return self._take_other(whole.end())
        self._begin_value(self._in_other)
        return at

    def _in_arguments(self, text: str, at: int) -> int:
        piece, at = self._value.feed(text, at)
        if self._value.progress is Progress.DONE:
            piece = piece[:-1]
            self._state = self._after
        if piece:
            self._arguments.append(piece)
        return self._fail(at) if self._value.progress is Progress.FAILED else at

    def _in_other(self, text: str, at: int) -> int:
        piece, at = self._value.feed(text, at)
        self._text.append(piece)
        if self._value.progress is Progress.FAILED:
            return self._fail(at)
        if self._value.progress is Progress.DONE:
            self._state = self._after
            return self._take_other(at)
        return at

    def _take_other(self, at: int) -> int:
        """A value that is not the arguments object is complete: a name, an id, null arguments, or something to ignore."""
        text = "".join(self._text)
        self._text = []
        if self._key in _ARGUMENT_KEYS:
            self._read = True
        elif self._key == "name" and self.name is None:
            self.name = json.loads(text)
            # Empty, or a control character or half a surrogate pair, which no client could take.
            if not self.name.strip() or not self.name.isprintable():
                self.name = None
                return self._fail(at)
        elif self._key == "id" and self.id is None and not self.begun and text.startswith('"'):
            self.id = json.loads(text) or None
        return at

    def _after(self, text: str, at: int) -> int:
        if text[at] == ",":
            self._state = self._next_key
            return at + 1
        return self._close(at) if text[at] == "}" else self._space(text, at)

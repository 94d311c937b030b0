"""One Python literal, turned into JSON as it arrives.

Strings (also triple-quoted, and with real line breaks, which models write), numbers, ``True``, ``False``, ``None`` and their JSON spellings, lists, tuples, and
dicts with string keys. Anything else, a call or an operator for example, fails: nothing is ever evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tokenspeed.interfaces.parsing.json_stream import MAX_DEPTH, Progress, quote

__all__ = ["LiteralStream"]

_SPACE = " \t\r\n"
_BLANK = re.compile(r"[ \t\r\n]*")
_ATOM = re.compile(r"[\w.+-]*")
_NUMBER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(
    r"([+-]?)([0-9]+(?:_[0-9]+)*)?(?:\.([0-9]+(?:_[0-9]+)*)?(?P<point>))?(?:[eE]([+-]?[0-9]+))?"
)
_BASED = re.compile(r"([+-]?)(0(?:[xX](?:_?[0-9a-fA-F])+|[oO](?:_?[0-7])+|[bB](?:_?[01])+))")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_HEXADECIMAL = {"x": 2, "u": 4, "U": 8}
# Only short cuts: a number that JSON writes alike, with what follows; and a string without escapes that is there as a whole, and is not
# the beginning of three quotes.
_SIMPLE_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,30}+)(?:\.[0-9]{1,30}+)?(?=[\s,:)\]}])")
_WHOLE_STRING = re.compile(r"""'[^'\\]*+'(?!')|"[^"\\]*+"(?!")""")
_MAX_ATOM = 3500  # so that a hexadecimal number stays under Python's limit of decimal digits
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_PLAIN = {mark: re.compile(rf"[^\\{mark}]*") for mark in "'\""}


def _number(atom: str) -> str:
    """The JSON form of a Python number; empty if ``atom`` is none."""
    if _NUMBER.fullmatch(atom):
        return atom.removeprefix("+")
    if match := _BASED.fullmatch(atom):
        value = int(match[2].replace("_", ""), 0)
        return f"-{value}" if match[1] == "-" and value else str(value)
    match = _PYTHON_NUMBER.fullmatch(atom)
    if match is None or not (match[2] or match[3]):
        return ""
    sign, whole, fraction, point, exponent = match.groups()
    digits = (whole or "0").replace("_", "")
    if len(digits) > 1 and digits[0] == "0":
        return ""
    text = ("-" if sign == "-" else "") + digits
    if point is not None:
        text += "." + (fraction or "0").replace("_", "")
    return text + (f"e{exponent}" if exponent else "")


class LiteralStream:
    """Reads one literal out of a text that arrives in pieces; the face is that of ``JsonStream``.

    A number or a word ends at the first character that cannot belong to it, which is not consumed.
    """

    __slots__ = ("_atom", "_count", "_key", "_out", "_quote", "_stack", "_state", "progress")

    def __init__(self) -> None:
        self.progress = Progress.OPEN
        self._stack: list[str] = []  # the opening character of each open container
        self._state: Callable[[str, int], int] = self._value
        self._key = False  # what is being read is a key of a dict
        self._atom = ""  # a number or word, or the digits of an escape
        self._count = 0  # quotes in a row, or digits that an escape still needs
        self._quote = ""
        self._out: list[str] = []

    def feed(self, text: str, begin: int = 0) -> tuple[str, int]:
        """Read on at ``text[begin]``: ``(JSON text, offset of the first character that does not belong to the literal)``."""
        at, size = begin, len(text)
        self._out = []
        while at < size and self.progress is Progress.OPEN:
            at = self._state(text, at)
        return "".join(self._out), at

    def _fail(self, at: int) -> int:
        self.progress = Progress.FAILED
        return at

    def _end(self, at: int) -> int:
        if self._key:
            self._state = self._colon
        elif self._stack:
            self._state = self._after
        else:
            self.progress = Progress.DONE
        return at

    def _value(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                return at
        char = text[at]
        if char in "'\"":
            whole = _WHOLE_STRING.match(text, at)
            if whole and whole.end() < len(text):
                self._out.append(quote(whole[0][1:-1]))
                return self._end(whole.end())
            self._quote, self._count, self._state = char, 1, self._opening
            self._out.append('"')
            return at + 1
        if self._key:
            return self._fail(at)
        if char in _CLOSERS:
            if len(self._stack) == MAX_DEPTH:
                return self._fail(at)
            self._stack.append(char)
            self._out.append("{" if char == "{" else "[")
            self._state = self._first
            return at + 1
        if simple := _SIMPLE_NUMBER.match(text, at):
            self._out.append(simple[0])
            return self._end(simple.end())
        self._atom, self._state = "", self._word
        return self._word(text, at) if _ATOM.match(char).end() else self._fail(at)  # type: ignore[union-attr]

    def _first(self, text: str, at: int) -> int:
        """Behind the opening of a container: an element or the end."""
        return self._element(text, at, "")

    def _next(self, text: str, at: int) -> int:
        """Behind a comma: an element or the end."""
        return self._element(text, at, ", ")

    def _element(self, text: str, at: int, separator: str) -> int:
        if text[at] in _SPACE:
            at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                return at
        opening = self._stack[-1]
        if text[at] == _CLOSERS[opening]:
            return self._close(at)
        if separator:
            self._out.append(separator)
        self._key = opening == "{"
        self._state = self._value
        return self._value(text, at)

    def _close(self, at: int) -> int:
        self._out.append("}" if self._stack.pop() == "{" else "]")
        return self._end(at + 1)

    def _after(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                return at
        char = text[at]
        if char == ",":
            self._state = self._next
            return at + 1
        return self._close(at) if char == _CLOSERS[self._stack[-1]] else self._fail(at)

    def _colon(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                return at
        if text[at] != ":":
            return self._fail(at)
        self._out.append(": ")
        self._key, self._state = False, self._value
        return at + 1

    # -- numbers and words

    def _word(self, text: str, at: int) -> int:
        end = min(_ATOM.match(text, at).end(), at + _MAX_ATOM + 1 - len(self._atom))  # type: ignore[union-attr]
        self._atom += text[at:end]
        if len(self._atom) > _MAX_ATOM:
            return self._fail(end)
        return self._end_word(end) if end < len(text) else end

    def _end_word(self, at: int) -> int:
        word = _WORDS.get(self._atom) or _number(self._atom)
        if not word:
            return self._fail(at)
        self._out.append(word)
        return self._end(at)

    # -- strings

    def _opening(self, text: str, at: int) -> int:
        """Behind the first quote: the empty string, three quotes, or text."""
        if text[at] == self._quote:
            self._count += 1
            if self._count == 3:
                self._quote, self._state, self._count = self._quote * 3, self._string, 0
            return at + 1
        if self._count == 2:
            self._out.append('"')
            return self._end(at)
        self._state, self._count = self._string, 0
        return at

    def _string(self, text: str, at: int) -> int:
        char = text[at]
        mark = self._quote[0]
        if char == "\\":
            self._release_quotes()
            self._state = self._escape
            return at + 1
        if char == mark:
            self._count += 1
            if self._count == len(self._quote):
                self._out.append('"')
                self._count = 0
                return self._end(at + 1)
            return at + 1
        self._release_quotes()
        end = _PLAIN[mark].match(text, at).end()  # type: ignore[union-attr]
        self._emit(text[at:end])
        return end

    def _release_quotes(self) -> None:
        if self._count:
            self._emit(self._quote[0] * self._count)
            self._count = 0

    def _emit(self, text: str) -> None:
        self._out.append(quote(text)[1:-1])

    def _escape(self, text: str, at: int) -> int:
        char = text[at]
        self._state = self._string
        if char in _HEXADECIMAL:
            self._atom, self._count, self._state = "", _HEXADECIMAL[char], self._digits
        elif char in "01234567":
            self._atom, self._state = char, self._octal
        elif char in _ESCAPES:
            self._emit(_ESCAPES[char])
        else:  # Python keeps the backslash of an escape that it does not know
            self._emit("\\" + char)
        return at + 1

    def _octal(self, text: str, at: int) -> int:
        if text[at] in "01234567" and len(self._atom) < 3:
            self._atom += text[at]
            return at + 1
        self._emit(chr(int(self._atom, 8)))
        self._state = self._string
        return at

    def _digits(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._fail(at)
        self._atom += text[at]
        self._count -= 1
        if not self._count:
            code = int(self._atom, 16)
            if code > 0x10FFFF:
                return self._fail(at)
            # Half of a surrogate pair has no UTF-8 form; JSON can still spell it.
            self._out.append(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else quote(chr(code))[1:-1])
            self._state = self._string
        return at + 1

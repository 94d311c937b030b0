"""Sets of characters as sorted ranges of code points, and how a regular expression writes them."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "ANY",
    "ANY_SPACE",
    "DIGIT",
    "DOT",
    "JSON_PLAIN",
    "SPACE",
    "TEXT",
    "WORD",
    "Ranges",
    "intersect",
    "invert",
    "merge",
    "render",
]

#: Ranges of code points, both ends included, sorted, neither touching nor overlapping.
Ranges = tuple[tuple[int, int], ...]

_LAST = 0x10FFFF


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The union of ``ranges`` in their one form."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return tuple(out)


def invert(ranges: Ranges) -> Ranges:
    """All other code points."""
    out, begin = [], 0
    for low, high in ranges:
        if low > begin:
            out.append((begin, low - 1))
        begin = high + 1
    if begin <= _LAST:
        out.append((begin, _LAST))
    return tuple(out)


def intersect(a: Ranges, b: Ranges) -> Ranges:
    """Code points in both."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low <= high:
            out.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


ANY: Ranges = ((0, _LAST),)
#: What a text can hold: everything but surrogates.
TEXT: Ranges = ((0, 0xD7FF), (0xE000, _LAST))
#: What stands for itself in a JSON string.
JSON_PLAIN: Ranges = intersect(TEXT, invert(merge([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])))
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = merge([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
#: White space: what is generated for it, and what is kept from being generated for its opposite, which is that of ECMAScript and of Python together.
SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_SINGLE_SPACES = (0x20, 0x85, 0xA0, 0x1680, 0x202F, 0x205F, 0x3000, 0xFEFF)
ANY_SPACE: Ranges = merge(
    [(0x09, 0x0D), (0x1C, 0x1F), (0x2000, 0x200A), (0x2028, 0x2029), *((code, code) for code in _SINGLE_SPACES)]
)
#: What a dot stands for.
DOT: Ranges = invert(((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)))


def _char(code: int) -> str:
    if code < 0x80:
        char = chr(code)
        return char if char.isalnum() else f"\\u{code:04x}"  # \\xHH would swallow hexadecimal digits behind it
    return chr(code)


def render(ranges: Ranges) -> str:
    """``ranges``, not empty, as one character or class. A set that reaches to the last code point is written by what it lacks, since surrogates cannot be."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    negated = ranges[-1][1] == _LAST
    body = "".join(
        _char(low) if low == high else f"{_char(low)}-{_char(high)}"
        for low, high in intersect(invert(ranges) if negated else ranges, TEXT)
    )
    return f"[{'^' if negated else ''}{body}]"

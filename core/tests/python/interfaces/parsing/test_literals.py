"""Python literals become JSON of the same value; anything else fails."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.interfaces.parsing import LiteralStream, Progress

TEXTS = st.text("ab'\"\\\n\t{}[]() ü日😀\x00\x7f", max_size=8)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)


def read(text: str, size: int = 0) -> tuple[Progress, str]:
    stream, told = LiteralStream(), ""
    text += ")"
    for begin in range(0, len(text), size or len(text)):
        piece = text[begin : begin + (size or len(text))]
        part, end = stream.feed(piece)
        told += part
        if end < len(piece):
            break
    return stream.progress, told


@given(VALUES)
def test_values_survive(value: Any) -> None:
    for size in (0, 1, 3):
        progress, told = read(repr(value), size)
        assert progress is Progress.DONE
        assert json.loads(told) == value


@pytest.mark.parametrize(
    "text",
    [
        "1_000",
        "0x1F",
        "-0b101",
        "+5",
        "1.",
        ".5",
        "1e5",
        "(1, 2)",
        "(1,)",
        "[1, 2,]",
        "'''a\n'b''c'''",
        '""',
        "''''a'''",
        r"'\x41\u00fc\101\q'",
        "( )",
        "-0",
    ],
)
def test_it_agrees_with_python(text: str) -> None:
    wanted = ast.literal_eval(text.replace(r"\q", r"\\q"))
    for size in (0, 1):
        progress, told = read(text, size)
        assert progress is Progress.DONE, text
        assert json.loads(told) == (list(wanted) if isinstance(wanted, tuple) else wanted)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "f()",
        "1 + 1",
        "{1: 2}",
        "{1}",
        "[1 2]",
        "[,]",
        "1__0",
        "007",
        "b'x'",
        "'\\u12'",
        "--1",
        "nan",
        "[" * 300,
        "9" * 4000,
    ],
)
def test_anything_else_fails(text: str) -> None:
    """Or ends before what is no literal, which the caller then finds."""
    for size in (0, 1):
        progress, told = read(text, size)
        assert progress is Progress.FAILED or told == "1"


def test_half_a_surrogate_pair_is_spelled() -> None:
    """It has no UTF-8 form, so it stays an escape."""
    assert read("'\\ud800'") == (Progress.DONE, '"\\ud800"')

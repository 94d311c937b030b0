"""The JSON stream accepts what JSON accepts, copies it, and says at once when a text cannot become JSON any more."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.interfaces.parsing import JsonStream, Progress, is_complete
from tokenspeed.interfaces.parsing.json_stream import MAX_DEPTH

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=15,
)


def read(text: str, pieces: list[str] | None = None) -> tuple[Progress, str]:
    """Progress and copied text; reading stops where the value does."""
    stream, copied = JsonStream(), ""
    for piece in [text] if pieces is None else pieces:
        part, end = stream.feed(piece)
        copied += part
        if end < len(piece):
            break
    stream.finish()
    return stream.progress, copied


@given(VALUES, st.sampled_from([None, 0, 2]), st.booleans())
def test_json_is_copied_as_it_is(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert read(text) == (Progress.DONE, text)
    assert read(text, list(text)) == (Progress.DONE, text)


@given(st.text('{}[]":,0123456789-+.eEtrufalsn\\ \n', max_size=12))
def test_it_agrees_with_the_json_module(text: str) -> None:
    """For texts without raw control characters in strings: complete exactly where ``json.loads`` accepts."""
    if any(char < " " for part in text.split('"')[1::2] for char in part):
        return
    try:
        json.loads(text)
        accepted = True
    except ValueError:
        accepted = False
    stream = JsonStream()
    _, end = stream.feed(text)
    stream.finish()
    complete = stream.progress is Progress.DONE and not text[end:].strip()
    assert complete == accepted
    assert read(text, list(text))[0] == read(text)[0]


def test_raw_control_characters_in_strings_are_escaped() -> None:
    """Models write real line breaks; clients refuse them."""
    progress, copied = read('{"a": "x\ny\tz\x01"}')
    assert progress is Progress.DONE
    assert json.loads(copied) == {"a": "x\ny\tz\x01"}


@pytest.mark.parametrize(
    "text", ['{"a" 1', "[1,]", "{,", "[01]", "1.x", "tru_", '"\\q', '"\\u12g', "{1", "[}", "-x", "NaN"]
)
def test_a_text_that_cannot_become_json_fails_at_the_character(text: str) -> None:
    stream = JsonStream()
    _, end = stream.feed(text)
    assert stream.progress is Progress.FAILED
    prefix = JsonStream()
    prefix.feed(text[:end])
    assert prefix.progress is Progress.OPEN


def test_nesting_is_limited() -> None:
    """A depth that clients' readers could not take is refused, whatever its length."""
    assert read("[" * MAX_DEPTH + "]" * MAX_DEPTH)[0] is Progress.DONE
    assert read("[" * (MAX_DEPTH + 1))[0] is Progress.FAILED


@pytest.mark.parametrize("arguments", ["{}", '{"a": 1}', '{"n": ' + "9" * 5000 + "}"])
def test_a_complete_object(arguments: str) -> None:
    """Also with a number that has more digits than ``json.loads`` takes."""
    assert is_complete(arguments)


@pytest.mark.parametrize("arguments", ["", "{", '{"a": ', "[]", "null", "{} ", "{}}"])
def test_anything_else_is_not_complete(arguments: str) -> None:
    assert not is_complete(arguments)


@pytest.mark.parametrize("unit", ["[],", '{"a":1},', "1,", '"\\n",', "  ", '"x",'])
def test_a_megabyte_takes_less_than_a_second(unit: str) -> None:
    """CPU time, better of two runs."""
    text = "[" + unit * (1_000_000 // len(unit))
    best = 9.0
    for _ in range(2):
        begin = time.process_time()
        JsonStream().feed(text)
        best = min(best, time.process_time() - begin)
    assert best < 1

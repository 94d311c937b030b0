"""A call object is read in any order of keys, and what is no call fails as early as it shows."""

from __future__ import annotations

import pytest

from tokenspeed.interfaces.parsing import JsonCall, Progress


def read(text: str, strict: bool = False, size: int = 0) -> tuple[JsonCall, str]:
    call, told, at = JsonCall(strict=strict), "", 0
    for begin in range(0, len(text), size or len(text)):
        piece = text[begin : begin + (size or len(text))]
        part, at = call.feed(piece)
        told += part
        if at < len(piece):
            break
    return call, told


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', "f", '{"a": 1}'),
        ('{"arguments": {"a": [{}]}, "name": "f"}', "f", '{"a": [{}]}'),
        ('{ "id": "x", "parameters" : {} , "name" : "f" }', "f", "{}"),
        ('{"name": "f"}', "f", "{}"),
        ('{"name": "f", "arguments": null}', "f", "{}"),
        ('{"extra": [1, {"name": "g"}], "name": "f", "arguments": {}, "arguments": {"b": 2}, "name": "h"}', "f", "{}"),
        ('{"na\\u006de": "\\u0066", "arguments": {}}', "f", "{}"),
    ],
)
def test_calls(text: str, name: str, arguments: str, size: int) -> None:
    call, told = read(text, size=size)
    assert (call.progress, call.name, told) == (Progress.DONE, name, arguments)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "", "arguments": {}}',
        '{"name": 5}',
        '{"arguments": [1]}',
        '{"arguments": {}}',
        '{"name": "\\ud800"}',
        '{"name": "f", "arguments": "{}"}',
        "[1]",
        "{}",
    ],
)
def test_malformed_calls_fail(text: str, size: int) -> None:
    """No usable name, or arguments that are no object: never begun, or at least never complete."""
    call, told = read(text, size=size)
    assert (call.progress, told) == (Progress.FAILED, "")


def test_the_last_brace_waits_for_the_end_of_the_call() -> None:
    """A call that breaks behind its arguments was never shown as complete."""
    call, told = read('{"name": "f", "arguments": {"a": 1} oops')
    assert (call.progress, told) == (Progress.FAILED, '{"a": 1')


@pytest.mark.parametrize(
    "text",
    ['{"k"', '{"name": {', '{"name": "Bob", "age"', '{"name": "Bob"}', '{"parameters"', '{"type": 1', '{"id": null'],
)
def test_strict_leaves_other_json_alone(text: str) -> None:
    """In plain text only an object that begins like a call is one."""
    for size in (0, 1):
        call, _ = read(text, strict=True, size=size)
        assert call.progress is Progress.FAILED
        assert not call.begun


def test_an_id_counts_if_it_comes_in_time() -> None:
    """Whatever was told of a call does not change, however the text is cut."""
    for size in (0, 1):
        assert read('{"id": "x", "name": "f", "arguments": {}}', size=size)[0].id == "x"
        assert read('{"name": "f", "arguments": {}, "id": "x"}', size=size)[0].id is None

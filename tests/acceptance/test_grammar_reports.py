"""Reported faults of constrained decoding, against the backend that is installed: a byte vocabulary with two stop tokens and the markers of reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.grammar import GrammarContext, GrammarMatcher, GrammarRequest, mask_words
from tokenspeed.interfaces.parsing import TagReasoningParser
from tokenspeed.interfaces.reasoning import ReasoningContext

xgrammar = pytest.importorskip("tokenspeed_plugin_grammar_xgrammar.backend", reason="needs the xgrammar plugin")
checker = pytest.importorskip("tokenspeed_plugin_grammar_xgrammar.checker", reason="needs the xgrammar plugin")

STOPS = (256, 257)
THINK, END, CALL = 258, 259, 257
SIZE = 260


@cache
def backend() -> Any:
    return xgrammar.XGrammarBackend(
        GrammarContext(
            vocabulary=[*(bytes((i,)) for i in range(256)), b"", b"", b"<think>", b"</think>"],
            vocab_size=SIZE,
            stop_token_ids=STOPS,
            special_token_ids={"<|end|>": 256, "<|call|>": 257},
        )
    )


def matcher(kind: str, value: object) -> GrammarMatcher:
    text = value if isinstance(value, str) else json.dumps(value)
    checker.check(kind, text)
    found: GrammarMatcher = backend().compile(GrammarRequest(kind=kind, value=text)).matcher()
    return found


def allowed(one: GrammarMatcher) -> set[int]:
    mask = np.zeros((1, mask_words(SIZE)), dtype=np.int32)
    if not one.fill_mask(mask, 0):
        return set(range(SIZE))
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:SIZE]).tolist())


def takes(one: GrammarMatcher, tokens: Iterable[int]) -> bool:
    return all(one.accept(token) for token in tokens)


def fits(schema: object, text: str) -> bool:
    one = matcher("json_schema", schema)
    return takes(one, text.encode()) and one.accept(STOPS[0])


NOT_SILENT: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "pattern": "^[a-z]*$", "minLength": 5}, '"ab"'),
    ({"type": "integer", "multipleOf": 7}, "5"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
    ({"type": "array", "contains": {"const": 1}}, "[2]"),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    ({"not": {"type": "string"}}, '"a"'),
    ({"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 7}}, "9"),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, '{"ab": "x"}'),
    ({"type": "string", "format": "email"}, '"no address"'),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, "5"),
]


@pytest.mark.parametrize(("schema", "bad"), NOT_SILENT, ids=lambda value: value if isinstance(value, str) else None)
def test_gram_01_no_keyword_is_dropped_without_a_word(schema: dict[str, Any], bad: str) -> None:
    """gram-01: what breaks the schema cannot be generated, or the schema is refused with the keyword's path."""
    try:
        assert not fits(schema, bad)
    except GrammarError as error:
        assert str(error).startswith("$")  # noqa: PT017 - either is right


RECURSIVE = [
    (
        {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
                    "additionalProperties": False,
                }
            },
        },
        '{"kids": [{"kids": []}, {}]}',
    ),
    ({"$defs": {"v": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/v"}]}}, "$ref": "#/$defs/v"}, '"a"'),
    ({"$ref": "#"}, "1"),
]


@pytest.mark.parametrize(("schema", "good"), RECURSIVE, ids=["tree", "union", "itself"])
def test_gram_04_recursion_works_or_is_refused(schema: dict[str, Any], good: str) -> None:
    """gram-04: never the end of a process."""
    try:
        assert fits(schema, good)
    except GrammarError as error:
        assert "$" in str(error)  # noqa: PT017 - either is right


@pytest.mark.parametrize("pad", [" \n", "\n\t ", "\t\r "])
def test_gram_06_white_space_cannot_go_on(pad: str) -> None:
    """gram-06: whoever takes white space wherever it may still finishes the object in 64 tokens."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    one = matcher("json_schema", {**schema, "additionalProperties": False})
    prefer: Callable[[int], tuple[bool, bool, int]] = lambda token: (  # noqa: E731
        chr(token) not in pad,
        token not in STOPS,
        -token if 48 <= token < 58 else token,
    )
    text: list[int] = []
    while not one.terminated:
        token = min(allowed(one), key=prefer)
        assert one.accept(token)
        text.append(token)
        assert len(text) <= 64
    assert set(json.loads(bytes(text[:-1]))) == {"a", "b"}


def test_gram_07_every_stop_id_ends_a_complete_text() -> None:
    """gram-07: behind the end nothing but the model's stop tokens is allowed, each of them."""
    for stop in STOPS:
        one = matcher("json_schema", {"type": "boolean"})
        assert not allowed(one) & set(STOPS)
        assert takes(one, b"true")
        assert allowed(one) == set(STOPS)
        assert one.accept(stop)
        assert one.terminated


def test_gram_09_tokens_behind_the_end_are_refused_without_harm() -> None:
    """gram-09: a window that reaches past the end is cut there, and can be taken back."""
    one = matcher("json_schema", {"type": "object", "properties": {}, "additionalProperties": False})
    assert [one.accept(token) for token in (ord("{"), ord("}"), STOPS[0], ord("x"), ord("y"))] == [True] * 3 + [
        False
    ] * 2
    one.rollback(2)
    assert ord("}") in allowed(one)


def test_gram_15_a_stop_token_may_be_part_of_the_grammar() -> None:
    """gram-15: named by a structural tag it is taken as its end; and where a call is complete, it ends the text."""
    value = {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, {"type": "token", "token": CALL}]}
    one = matcher("structural_tag", {"type": "structural_tag", "format": value})
    assert takes(one, [ord("a"), CALL])
    two = matcher(
        "structural_tag",
        {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": value["elements"][0], "end": ""}},
    )  # type: ignore[index]
    assert takes(two, [*b"<a", CALL])
    assert two.terminated


class ThinkParser(TagReasoningParser):
    """``<think>`` .. ``</think>``."""


def test_reason_07_the_answer_s_form_begins_with_the_token_behind_the_reasoning() -> None:
    """reason-07: of tokens that come in one step with the end tag, those behind it are held to the form; free text there is not taken."""
    reasoning = ThinkParser(ReasoningContext(prompt_tail="<|assistant|>"))
    form = {"type": "json_schema", "json_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    framed = {"type": "structural_tag", "format": reasoning.answer_format(form, {"<think>": THINK, "</think>": END})}
    thought = [THINK, *b"hm </thin k> {", END]
    one = matcher("structural_tag", framed)
    assert takes(one, [*thought, *b"{}", STOPS[0]])
    for free in (b"Hi", b"\n\n\n", b"x{"):
        two = matcher("structural_tag", framed)
        assert takes(two, thought)
        assert not takes(two, free)
    assert takes(matcher("structural_tag", framed), b"{}")
    assert not takes(matcher("structural_tag", framed), b"Hi")
    assert not takes(matcher("structural_tag", framed), b"<think>")

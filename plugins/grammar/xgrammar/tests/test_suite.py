"""The contract of grammar backends, and what users reported of others."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import ClassVar

import pytest
from tokenspeed_plugin_grammar_xgrammar.backend import XGrammarBackend
from tokenspeed_plugin_grammar_xgrammar.plugin import tokenspeed_grammar_backends
from tokenspeed_plugin_grammar_xgrammar.testing.walks import STOP, TINY, walk

from tokenspeed.interfaces.grammar import GrammarContext, GrammarMatcher, GrammarRequest
from tokenspeed.testing.grammar_backend import GrammarBackendSuite, allowed_tokens

_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[ab]{2}$"}, "b": {"type": ["integer", "null"]}},
    "required": ["a"],
}
_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<c>",
        "content": {"type": "json_schema", "json_schema": _SCHEMA},
        "end": "</c>",
    },
}


class TestXGrammar(GrammarBackendSuite):
    spec = tokenspeed_grammar_backends()[0]
    samples: ClassVar[dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
        **GrammarBackendSuite.samples,
        "json_schema": (
            json.dumps(_SCHEMA),
            ('{"a":"ab"}', '{ "a": "aa", "b": null }'),
            ('{"a":"abc"}', '{"b":1}', '{"a":  "ab"}'),
        ),
        "ebnf": ('root ::= "a" root | "b"', ("b", "aab"), ("", "a", "ba")),
        "structural_tag": (json.dumps(_TAG), ('<c>{"a":"bb"}</c>',), ("<c></c>", '{"a":"bb"}')),
    }
    malformed = (
        ("regex", "(a"),
        ("regex", "[a"),
        ("ebnf", "a ::= b"),
        ("ebnf", 'root ::= ("a"'),
        ("choice", "[]"),
        ("choice", '["a", 1]'),
        ("json_schema", "{"),
        ("json_schema", '{"type": "nothing"}'),
        ("json_schema", '{"minimum": NaN}'),
        ("structural_tag", "{}"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "json_schema"}}'),
        ("no such kind", "a"),
    )


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    return XGrammarBackend(TINY)


def matcher_of(backend: XGrammarBackend, kind: str, value: object) -> GrammarMatcher:
    text = value if isinstance(value, str) else json.dumps(value)
    return backend.compile(GrammarRequest(kind=kind, value=text)).matcher()


def test_the_checker_runs_without_xgrammar() -> None:
    text = "import sys, tokenspeed_plugin_grammar_xgrammar.checker; sys.exit(any(m in sys.modules for m in ('xgrammar', 'torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0


def test_rolling_back_equals_a_fresh_matcher_fed_with_what_is_left(backend: XGrammarBackend) -> None:
    rng = random.Random(3)
    compiled = backend.compile(GrammarRequest(kind="json_schema", value=json.dumps({"type": "object"})))
    for _ in range(20):
        matcher, taken = compiled.matcher(), list[int]()
        for _ in range(60):
            if taken and rng.random() < 0.3:
                count = rng.randint(1, len(taken))
                matcher.rollback(count)
                del taken[-count:]
            if not matcher.terminated:
                allowed = allowed_tokens(matcher, TINY.vocab_size)
                assert allowed
                taken.append(rng.choice(sorted(allowed)))
                assert matcher.accept(taken[-1])
        fresh = compiled.matcher()
        assert all(fresh.accept(token) for token in taken)
        assert fresh.terminated == matcher.terminated
        if not fresh.terminated:
            assert allowed_tokens(fresh, TINY.vocab_size) == allowed_tokens(matcher, TINY.vocab_size)


def test_masks_say_what_accept_takes_token_by_token(backend: XGrammarBackend) -> None:
    rng = random.Random(4)
    for kind, value in (
        ("json_schema", _SCHEMA),
        ("json_object", ""),
        ("regex", "(a|ab?c)*é"),
        ("structural_tag", _TAG),
    ):
        matcher = matcher_of(backend, kind, value)
        for _ in range(12):
            allowed = allowed_tokens(matcher, TINY.vocab_size)
            for token in range(TINY.vocab_size):
                taken = matcher.accept(token)
                assert taken == (allowed is None or token in allowed), (kind, token)
                matcher.rollback(int(taken))
            assert matcher.accept(rng.choice(sorted(allowed or range(STOP))))
            if matcher.terminated:
                break


def test_gram_06_white_space_is_bounded(backend: XGrammarBackend) -> None:
    compiled = backend.compile(
        GrammarRequest(kind="json_schema", value=json.dumps({**_SCHEMA, "required": ["a", "b"]}))
    )
    for preferred in (b" ", b"\n", b"\t"):
        matcher, text = compiled.matcher(), bytearray()
        while not matcher.terminated and len(text) < 64:
            allowed = allowed_tokens(matcher, TINY.vocab_size)
            assert allowed
            white = [token for token in allowed if TINY.vocabulary[token] == preferred]
            ends = (
                [STOP]
                if STOP in allowed
                else [token for token in allowed if TINY.vocabulary[token] in (b"}", b'"', b"null")]
            )
            token = (white or ends or sorted(allowed))[0]
            assert matcher.accept(token)
            text += TINY.vocabulary[token]
        assert matcher.terminated, bytes(text)


def test_gram_07_every_stop_token_ends_a_complete_text_and_none_an_incomplete_one() -> None:
    ctx = GrammarContext(vocabulary=[bytes([byte]) for byte in range(256)], vocab_size=264, stop_token_ids=(257, 260))
    matcher = matcher_of(XGrammarBackend(ctx), "json_schema", {"type": "boolean"})
    for byte in b"true":
        assert not matcher.accept(257)
        assert matcher.accept(byte)
    assert allowed_tokens(matcher, 264) == {257, 260}
    assert matcher.accept(260)
    assert matcher.terminated


def test_gram_09_tokens_behind_the_end_are_not_taken_and_break_nothing(backend: XGrammarBackend) -> None:
    matcher = matcher_of(backend, "json_schema", {"const": {}})
    assert [matcher.accept(token) for token in (ord("{"), ord("}"), STOP, ord("x"), ord("y"), STOP)] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    matcher.rollback(2)
    assert not matcher.terminated
    assert matcher.accept(ord("}"))


def test_gram_15_a_stop_token_can_be_part_of_a_structural_tag() -> None:
    ctx = GrammarContext(
        vocabulary=[bytes([byte]) for byte in range(256)],
        vocab_size=260,
        stop_token_ids=(257, 258),
        special_token_ids={"<|call|>": 257},
    )
    elements = [{"type": "const_string", "value": "a"}, {"type": "token", "token": 257}]
    matcher = matcher_of(
        XGrammarBackend(ctx),
        "structural_tag",
        {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}},
    )
    assert matcher.accept(ord("a"))
    assert not matcher.accept(258)
    assert allowed_tokens(matcher, 260) == {257}
    assert matcher.accept(257)


def test_special_tokens_are_generated_only_where_a_tag_writes_them() -> None:
    special = {"<|end|>": 256, "<c>": 257, "<|im_start|>": 258}
    ctx = GrammarContext(
        vocabulary=[bytes([byte]) for byte in range(256)],
        vocab_size=260,
        stop_token_ids=(256,),
        special_token_ids=special,
    )
    backend = XGrammarBackend(ctx)
    for compiled in (
        found := backend.compile(GrammarRequest(kind="structural_tag", value=json.dumps(_TAG))),
        backend.deserialize(backend.serialize(found)),
    ):
        matcher = compiled.matcher()
        assert allowed_tokens(matcher, 260) == {ord("<"), 257}
        assert matcher.accept(257)
        assert not matcher.accept(258)
    text = matcher_of(backend, "json_schema", {"type": "string"})
    assert text.accept(ord('"'))
    assert not (allowed_tokens(text, 260) or set()) & {257, 258}


def test_a_slow_grammar_travels_compiled() -> None:
    ctx = GrammarContext(vocabulary=[bytes([byte]) for byte in range(256)], vocab_size=257, stop_token_ids=(256,))
    backend = XGrammarBackend(ctx)
    compiled = backend.compile(GrammarRequest(kind="json_schema", value=json.dumps(_SCHEMA)))
    compiled.head["source"] = None  # what a grammar has that took long
    again = XGrammarBackend(ctx).deserialize(backend.serialize(compiled))
    rng = random.Random(0)
    texts = [walk(again, rng, ctx=ctx) for _ in range(10)]
    assert all(text is None or json.loads(text)["a"] in ("aa", "ab", "ba", "bb") for text in texts)
    assert any(texts)

"""Regular expressions: what the grammar takes is what the expression says, in each place where one can stand."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import pytest
from tokenspeed_plugin_grammar_xgrammar import charsets
from tokenspeed_plugin_grammar_xgrammar.backend import XGrammarBackend
from tokenspeed_plugin_grammar_xgrammar.checker import check
from tokenspeed_plugin_grammar_xgrammar.names import other_than
from tokenspeed_plugin_grammar_xgrammar.regex import (
    Alt,
    Cat,
    Chars,
    Node,
    Repeat,
    literal,
    matches,
    render,
    search,
    size,
)
from tokenspeed_plugin_grammar_xgrammar.regex_parser import parse

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.grammar import GrammarContext, GrammarRequest

_WORDS = ["".join(word) for length in range(6) for word in itertools.product("abc", repeat=length)]


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    return XGrammarBackend(
        GrammarContext(vocabulary=[bytes([byte]) for byte in range(256)], vocab_size=257, stop_token_ids=(256,))
    )


def random_tree(rng: random.Random, depth: int = 3) -> Node:
    match rng.randrange(6) if depth else 0:
        case 0 | 1:
            ends = sorted(ord(char) for char in rng.choices("abc", k=2))
            return Chars(((ends[0], ends[1]),))
        case 2 | 3:
            return Cat(tuple(random_tree(rng, depth - 1) for _ in range(rng.randint(1, 3))))
        case 4:
            return Alt(tuple(random_tree(rng, depth - 1) for _ in range(rng.randint(2, 3))))
    low = rng.choice([0, 0, 1, 2])
    return Repeat(random_tree(rng, depth - 1), low, rng.choice([None, max(low, 1), low + 2]))


def _tag(content: dict[str, Any]) -> str:
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "tag", "begin": "", "content": content, "end": "."}}
    )


_PLACES = {
    "regex": lambda text: ("regex", text),
    "pattern": lambda text: ("json_schema", json.dumps({"type": "string", "pattern": f"^({text})$"})),
    "name": lambda text: (
        "json_schema",
        json.dumps(
            {"type": "object", "patternProperties": {f"^({text})$": True}, "minProperties": 1, "maxProperties": 1}
        ),
    ),
    "tag": lambda text: (
        "structural_tag",
        _tag({"type": "json_schema", "json_schema": {"type": "string", "pattern": f"^({text})$"}}),
    ),
    "qwen_xml": lambda text: (
        "structural_tag",
        _tag(
            {
                "type": "json_schema",
                "style": "qwen_xml",
                "json_schema": {
                    "type": "object",
                    "properties": {"k": {"type": "string", "pattern": f"^({text})$"}},
                    "required": ["k"],
                },
            }
        ),
    ),
}
_TEXTS = {
    "regex": "{}",
    "pattern": '"{}"',
    "name": '{{"{}":1}}',
    "tag": '"{}".',
    "qwen_xml": "<parameter=k>{}</parameter>.",
}


def compare(backend: XGrammarBackend, place: str, number: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(number):
        tree = random_tree(rng)
        if size(tree) > 40:
            continue
        text = render(tree, "$")
        kind, value = _PLACES[place](text)
        compiled = backend.compile(GrammarRequest(kind=kind, value=value))
        for word in rng.sample(_WORDS, 40):
            matcher = compiled.matcher()
            taken = all(matcher.accept(byte) for byte in _TEXTS[place].format(word).encode()) and matcher.accept(256)
            assert taken == matches(tree, word), (place, text, word)


@pytest.mark.parametrize("place", _PLACES)
def test_random_expressions_take_what_they_say(backend: XGrammarBackend, place: str) -> None:
    compare(backend, place, 60, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("place", _PLACES)
def test_many_random_expressions_take_what_they_say(backend: XGrammarBackend, place: str) -> None:
    compare(backend, place, 3000, seed=2)


@pytest.mark.parametrize("code", [*range(0x20, 0x17F), 0x2028, 0xFFFD, 0x1F600])
def test_every_character_is_written_so_that_only_it_is_taken(backend: XGrammarBackend, code: int) -> None:
    char = chr(code)
    for tree in (literal(char + "e0"), Cat((Chars(charsets.merge([(code, code), (0x30, 0x39)])), literal("f")))):
        text = render(tree, "$")
        compiled = backend.compile(GrammarRequest(kind="regex", value=text))
        good = char + "e0" if matches(tree, char + "e0") else char + "f"
        for word, wanted in ((good, True), ("\x01" + good[1:], False), (good + "e", False)):
            matcher = compiled.matcher()
            assert (all(matcher.accept(byte) for byte in word.encode()) and matcher.accept(256)) == wanted, (text, word)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ("^a|b$", ("ax", "xb", "b"), ("xa", "bx", "")),
        ("a{2,3}", ("aa", "xaaay"), ("a", "aba")),
        ("^[^\\S]$", (" ", "\t"), ("\x1c", "\u3000", "\ufeff", "a")),
        ("^[^\\s]$", ("a", "é"), (" ", "\u3000")),
        ("^[^\\D]$", ("0",), ("a", "\u0660")),
        ("^[^\\W]$", ("a", "_"), ("-", "é")),
        ("^(a[]|b)$", ("b",), ("a", "ab")),
        ("^a0{002}$", ("a00",), ("a0",)),
        ("^[^\\d\\s]+$", ("ab", "é-"), ("a1", "a b", "")),
        ("^(?:x|(?<n>y))*?z$", ("z", "xyz"), ("x", "zz")),
        ("^\\u0041\\x42\\u{43}[\\]^-]$", ("ABC]", "ABC^", "ABC-"), ("ABC", "ABCD")),
        ("^.$", ("a", "é", "\U0001f600"), ("", "ab", "\n")),
        ("^$", ("",), ("a",)),
        ("^{a}$", ("{a}",), ("a",)),
    ],
)
def test_expressions_are_read_by_the_rules_of_ecmascript(
    text: str, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    tree = search(parse(text, "$"), "$")
    assert all(matches(tree, word) for word in good)
    assert not any(matches(tree, word) for word in bad)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(?!a)", "negative look-ahead"),
        ("(?<=a)b", "look-behind"),
        ("(?i)a", "inline flags"),
        ("\\p{L}", "Unicode property"),
        ("a\\b", "word boundary"),
        ("(a)\\1", "escape"),
        ("a**", "possessive"),
        ("x{2}{3}", "nothing to repeat"),
        ("{2}", "nothing to repeat"),
        ("a{99999999999999}", "counted repeat"),
        ("a{0,99999999999999}", "counted repeat"),
        ("a{" + "9" * 5000 + ",}", "counted repeat"),
        ("[]", "matches no text"),
        ("[]]", "matches no text"),
        ("[]a", "matches no text"),
        ("([]+|a[])", "matches no text"),
        ("[^\\s\\S]", "matches no text"),
        ("[^\\w\\W]", "matches no text"),
        ("[^\\d\\D]", "matches no text"),
        ("[^\\0-\ud7ff\ue000-\U0010ffff]", "matches no text"),
        ("a{3,2}", "repeat of 3 to 2"),
        ("*a", "nothing to repeat"),
        ("(a", "not closed"),
        ("a)", "unmatched"),
        ("[z-a]", "bad range"),
        ("[a", "not closed"),
        ("a\\", "backslash"),
        ("a^b", "outermost"),
        ("{1000}" * 0 + "((a{1000}){1000}){1000}", "positions"),
        ("(a{0,200}b{0,200}){0,200}", "positions"),
        ("(" * 50 + ")" * 50, "nested"),
        ("a" * 10_000, "characters"),
    ],
)
def test_what_cannot_be_kept_or_is_too_large_is_refused(text: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        check("regex", text)


def test_matching_is_not_exponential() -> None:
    tree = parse("(a*)*b", "$")
    begin = time.process_time()
    assert not matches(tree, "a" * 2000)
    assert time.process_time() - begin < 2


def test_free_names_are_all_but_those_declared() -> None:
    names = ["a", "ab", "abc", "größe", ""]
    tree = other_than(names)
    assert not any(matches(tree, name) for name in names)
    assert all(matches(tree, name) for name in ("b", "aa", "abcd", "gro", "größ", "größer", "ä"))

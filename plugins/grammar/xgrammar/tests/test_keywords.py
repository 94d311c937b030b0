"""Every keyword of JSON Schema is enforced or refused: what a schema generates is drawn at random and judged by another implementation."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest
from tokenspeed_plugin_grammar_xgrammar.backend import XGrammarBackend
from tokenspeed_plugin_grammar_xgrammar.checker import check
from tokenspeed_plugin_grammar_xgrammar.formats import ENCODINGS, FORMATS, format_pattern
from tokenspeed_plugin_grammar_xgrammar.keywords import ANNOTATIONS, READ, REFUSED
from tokenspeed_plugin_grammar_xgrammar.regex import Alt, Cat, Chars, Node, Repeat, matches
from tokenspeed_plugin_grammar_xgrammar.testing.keywords import ROWS, Row, table
from tokenspeed_plugin_grammar_xgrammar.testing.schemas import random_schemas
from tokenspeed_plugin_grammar_xgrammar.testing.walks import TINY, walk

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.grammar import GrammarRequest

DOCS = Path(__file__).parents[4] / "docs" / "structured-outputs.md"


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    return XGrammarBackend(TINY)


def judge(schema: Any) -> Any:
    old = isinstance(schema, dict) and (
        isinstance(schema.get("items"), list) or schema.get("exclusiveMinimum") is True or "dependencies" in schema
    )
    cls = jsonschema.Draft4Validator if old else jsonschema.Draft202012Validator
    return cls(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


def generated(backend: XGrammarBackend, schema: Any, number: int, seed: int = 0) -> list[str]:
    compiled = backend.compile(GrammarRequest(kind="json_schema", value=json.dumps(schema)))
    rng = random.Random(seed)
    return [text for _ in range(number) if (text := walk(compiled, rng)) is not None]


def assert_valid(schema: Any, texts: list[str]) -> None:
    validator = judge(schema)
    for text in texts:
        assert validator.is_valid(json.loads(text)), (schema, text)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.keyword)
def test_what_is_generated_is_valid(backend: XGrammarBackend, row: Row) -> None:
    for schema in row.enforced:
        texts = generated(backend, schema, 60)
        assert texts
        assert_valid(schema, texts)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.keyword)
def test_what_is_refused_is_named_with_its_path(row: Row) -> None:
    for schema, path in row.refused:
        with pytest.raises(GrammarError) as caught:
            check("json_schema", json.dumps(schema))
        assert caught.value.message.startswith(f"{path}: "), caught.value.message


def test_no_keyword_is_missing_from_the_table() -> None:
    assert {row.keyword for row in ROWS} >= READ | REFUSED.keys()
    assert all(row.enforced or row.refused for row in ROWS)


def test_annotations_change_nothing() -> None:
    for name in ANNOTATIONS:
        check("json_schema", json.dumps({"type": "null", name: {}}))


def test_the_documentation_has_the_table() -> None:
    begin, end = "<!-- keywords: made from testing/keywords.py -->\n", "<!-- end -->\n"
    found = DOCS.read_text().partition(begin)[2].partition(end)[0]
    assert found == table(), f"write this between the marks of {DOCS.name}:\n{table()}"


def test_random_schemas_generate_valid_texts(backend: XGrammarBackend) -> None:
    texts = 0
    for schema in random_schemas(200, seed=1):
        found = generated(backend, schema, 4)
        assert_valid(schema, found)
        texts += len(found)
    assert texts > 700


@pytest.mark.slow
def test_many_random_schemas_generate_valid_texts(backend: XGrammarBackend) -> None:
    for seed in range(2, 12):
        for schema in random_schemas(200, seed=seed):
            assert_valid(schema, generated(backend, schema, 20, seed))


def test_gram_01_a_pattern_keeps_its_length_and_nothing_is_dropped(backend: XGrammarBackend) -> None:
    compiled = backend.compile(
        GrammarRequest(kind="json_schema", value=json.dumps({"type": "string", "pattern": "^[a-z]*$", "minLength": 5}))
    )
    matcher = compiled.matcher()
    assert all(matcher.accept(byte) for byte in b'"ab')
    assert not matcher.accept(ord('"'))


def test_gram_04_recursive_references_compile_or_are_refused(backend: XGrammarBackend) -> None:
    kids = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
    looped = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/v"}]}
    for schema in ({"$ref": "#/$defs/n", "$defs": {"n": kids}}, {"$ref": "#/$defs/v", "$defs": {"v": looped}}):
        assert_valid(schema, generated(backend, schema, 20))
    with pytest.raises(GrammarError, match="no finite value"):
        check("json_schema", '{"$ref": "#"}')


def repeats(node: Node, *, starred: bool = False) -> Iterator[tuple[Repeat, bool]]:
    """Every repeat in ``node``, and whether it stands within a group that may come any number of times."""
    match node:
        case Cat(parts) | Alt(parts):
            for part in parts:
                yield from repeats(part, starred=starred)
        case Repeat(inner, _, high):
            yield node, starred
            yield from repeats(inner, starred=starred or high is None)


def letters(node: Node) -> bool:
    """Whether more than hexadecimal digits may stand in ``node``: most of a vocabulary is made of them."""
    match node:
        case Cat(parts) | Alt(parts):
            return any(map(letters, parts))
        case Repeat(inner):
            return letters(inner)
        case Chars(ranges):
            return any(low <= ord("m") <= high for low, high in ranges)
    return False


@pytest.mark.parametrize("name", sorted(FORMATS | ENCODINGS))
def test_formats_are_written_in_the_forms_that_are_fast_to_follow(name: str) -> None:
    """A row whose masks take 10 ms each would end. Counted groups of letters cost most, and repeats within starred groups."""
    for repeat, starred in repeats(format_pattern(name)):
        assert not starred, repeat
        counted = repeat.high not in (None, 1) and not isinstance(repeat.node, Chars)
        assert not (counted and letters(repeat.node)) or repeat.high <= 3, repeat


def test_uris_are_those_that_other_programs_read(backend: XGrammarBackend) -> None:
    """The judge above knows no URIs. Long hosts, paths, queries and fragments; no authority, spaces or stray percent signs."""
    for text in generated(backend, {"type": "string", "format": "uri"}, 300):
        uri = json.loads(text)
        parts = urlsplit(uri)
        assert parts.scheme, uri
        assert parts.hostname, uri
        assert parts.port is None or 0 < parts.port < 10_000, uri
        assert re.fullmatch(r"([!#-&(-;=?-Z_a-z~'@]|%[0-9A-F]{2})+", uri), uri
        assert uri.count("#") <= 1, uri
    tree = format_pattern("uri")
    for good in ("https://example.com", "a+b.c-1://h", f"http://{'x' * 99}.y-z.w:8080/a//b%20?c=/d&e#f?/", "s3://b/#"):
        assert matches(tree, good), good
    for bad in (
        "https://",
        "a:b",
        "1a://h",
        "h://-x",
        "h://x-",
        "h://a..b",
        "h://x:0",
        "h://x/%",
        "h://x/ y",
        "h://x#a#b",
    ):
        assert not matches(tree, bad), bad


def test_labels_of_hosts_stay_within_what_names_may_have() -> None:
    """63 characters, no hyphen at an end and no two in a row."""
    tree = format_pattern("hostname")
    for good in ("a", "a" * 31, "-".join("a" * 31), "a-1.b.c.d", "xn-a"):
        assert matches(tree, good), good
    for bad in ("", "a" * 32, "-a", "a-", "a--b", "a..b", ".a", "a.", "a.b.c.d.e", "a_b"):
        assert not matches(tree, bad), bad


def test_json_pointers_begin_with_a_slash_and_escape_tildes() -> None:
    tree = format_pattern("json-pointer")
    assert [matches(tree, text) for text in ("", "/", "/a//~0~1/", "a", "/~", "/~2")] == [True] * 3 + [False] * 3

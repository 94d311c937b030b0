"""Structural tags: the forms that tool families need, what they refuse, and arguments in XML-like forms."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenspeed_plugin_grammar_xgrammar.backend import XGrammarBackend
from tokenspeed_plugin_grammar_xgrammar.checker import check

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.grammar import GrammarContext, GrammarRequest

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "code": {"type": "string", "pattern": "^[a-z.]+$", "maxLength": 3},
        "note": {"type": "string", "maxLength": 20},
        "more": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]},
        "null": {"type": ["string", "null"]},
    },
    "required": ["city", "days"],
}
J = {"type": "json_schema", "json_schema": SCHEMA}


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    return XGrammarBackend(
        GrammarContext(vocabulary=[bytes([byte]) for byte in range(256)], vocab_size=257, stop_token_ids=(256,))
    )


def takes(backend: XGrammarBackend, format: dict[str, Any], *texts: str) -> list[bool]:
    compiled = backend.compile(
        GrammarRequest(kind="structural_tag", value=json.dumps({"type": "structural_tag", "format": format}))
    )
    found = []
    for text in texts:
        matcher = compiled.matcher()
        found.append(all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(256))
    return found


def call(name: str) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
        "content": J,
        "end": "}\n</tool_call>",
    }


ONE = '<tool_call>\n{"name": "a", "arguments": {"city": "x", "days": 3}}\n</tool_call>'
TWO = ONE + "\n" + ONE.replace('"a"', '"b"')


def test_required_calls_are_calls_and_nothing_else(backend: XGrammarBackend) -> None:
    many = {
        "type": "tags_with_separator",
        "tags": [call("a"), call("b")],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": False,
    }
    assert takes(backend, many, ONE, TWO, "", "text" + ONE, ONE + "text", ONE.replace('"a"', '"c"')) == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert takes(backend, {**many, "stop_after_first": True}, ONE, TWO, "") == [True, False, False]


def test_triggered_calls_stand_in_free_text(backend: XGrammarBackend) -> None:
    free = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [call("a"), call("b")]}
    assert takes(backend, free, "", "text", "a " + TWO + " b", "<tool_call>\nno", "<tool x") == [
        True,
        True,
        True,
        False,
        True,
    ]
    assert takes(backend, {**free, "stop_after_first": True}, "a " + ONE, ONE + " ") == [True, False]


def test_text_runs_up_to_a_marker(backend: XGrammarBackend) -> None:
    until = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    assert takes(
        backend,
        {"type": "sequence", "elements": [until, J]},
        'a</th</think>{"city":"x","days":1}',
        '{"city":"x","days":1}',
    ) == [True, False]


def test_sections_with_counted_calls(backend: XGrammarBackend) -> None:
    elements = [{"type": "regex", "pattern": "[0-9]{1,3}"}, {"type": "const_string", "value": "<arg>"}, J]
    one = {"type": "tag", "begin": "<call>f:", "content": {"type": "sequence", "elements": elements}, "end": "</call>"}
    whole = {
        "type": "tag",
        "begin": "<s>",
        "content": {"type": "tags_with_separator", "tags": [one], "separator": "", "at_least_one": True},
        "end": "</s>",
    }
    text = '<call>f:0<arg>{"city":"x","days":1}</call>'
    assert takes(backend, whole, f"<s>{text}{text}</s>", "<s></s>", f"<s>{text}") == [True, False, False]


_TYPES = {"3": "number", "[": "array", "n": "null"}
_WRITE = {
    "qwen_xml": lambda key, value, _: f"<parameter={key}>\n{value}\n</parameter>",
    "minimax_xml": lambda key, value, _: f'<parameter name="{key}">{value}</parameter>',
    "glm_xml": lambda key, value, _: f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>",
    "kimi_k3_xml": lambda key, value, text: (
        f'<|open|>argument key="{key}" type="{"string" if text else _TYPES.get(value[0])}"<|sep|>{value}<|close|>argument<|sep|>'
    ),
    "deepseek_xml": lambda key, value, text: (
        f'<｜DSML｜parameter name="{key}" string="{json.dumps(text)}">{value}</｜DSML｜parameter>'
    ),
}


def test_an_argument_that_names_its_type_names_the_one_it_has(backend: XGrammarBackend) -> None:
    """Of any type, of several, and of constants."""
    schema = {
        "type": "object",
        "properties": {"any": {}, "some": {"type": ["integer", "string"]}, "one": {"enum": ["a", 1, None]}},
    }
    format = {"type": "json_schema", "style": "kimi_k3_xml", "json_schema": schema}
    cases = {
        "any": [("string", "x"), ("number", "-1.5"), ("boolean", "true"), ("null", "null"), ("array", '[1, "x"]'), ("object", '{"a": {}}')],
        "some": [("string", "3"), ("number", "3")],
        "one": [("string", "a"), ("number", "1"), ("null", "null")],
    }  # fmt: skip
    for key, good in cases.items():
        texts = {
            (kind, value): f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
            for kind in ("string", "number", "boolean", "null", "array", "object", "integer")
            for _, value in good
        }
        told = [pair for pair, taken in zip(texts, takes(backend, format, *texts.values()), strict=True) if taken]
        expected = {pair for pair in texts if pair in good or (pair[0] == "string" and key == "any")}
        assert set(told) == expected


@pytest.mark.parametrize("style", _WRITE)
def test_arguments_in_xml_like_forms(backend: XGrammarBackend, style: str) -> None:
    def text(*arguments: tuple[str, str, bool], gap: str = "\n") -> str:
        return gap + "".join(_WRITE[style](*argument) + gap for argument in arguments)

    city, days = ("city", "x <b> &amp; </function>", True), ("days", "3", False)
    good = [
        text(city, days),
        text(city, days, gap=""),
        text(city, days, ("unit", "c", True), ("code", "a.b", True)),
        text(city, days, ("note", "twenty characters at", True)),
        text(city, days, ("more", '["a", "b"]', False), ("null", "null", False)),
        text(city, days, ("more", "words", True), ("null", "words", True)),
    ]
    bad = [
        text(city),
        text(days, city),
        text(city, ("days", "x", False)),
        text(city, days, ("unit", "k", True)),
        text(city, days, ("unit", " c", True)),
        text(city, days, ("code", "abcd", True)),
        text(city, days, ("note", "twenty-one characters", True)),
        text(city, days, ("note", "a < b", True)),
        text(city, days, ("more", "[1", True)),
        text(city, days, ("other", "x", True)),
    ]
    format = {**J, "style": style}
    assert takes(backend, format, *good) == [True] * len(good)
    assert takes(backend, format, *bad) == [False] * len(bad)
    assert takes(
        backend,
        {"type": "json_schema", "style": style, "json_schema": {"type": "object", "properties": {}}},
        "",
        "\n",
        text(days),
    ) == [True, True, False]
    assert takes(
        backend,
        {"type": "json_schema", "style": style, "json_schema": {"type": "object"}},
        "",
        text(city, ("k", "v", True)),
    ) == [True, True]


@pytest.mark.parametrize(
    ("format", "path"),
    [
        ({"type": "no_such"}, "$.format.type"),
        ({"type": "const_string", "value": "a", "valeu": 1}, "$.format.valeu"),
        ({"type": "const_string"}, "$.format"),
        (
            {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}},
            "$.format.json_schema.uniqueItems",
        ),
        ({"type": "json_schema", "json_schema": {}, "style": "yaml"}, "$.format.style"),
        ({"type": "json_schema", "json_schema": {}, "any_order": True}, "$.format.any_order"),
        ({"type": "json_schema", "json_schema": {"type": "string"}, "style": "qwen_xml"}, "$.format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a>": {}}}, "style": "qwen_xml"},
            "$.format.json_schema.properties['a>']",
        ),
        ({"type": "sequence", "elements": [{"type": "regex", "pattern": "(?=a)"}]}, "$.format.elements[0].pattern"),
        ({"type": "grammar", "grammar": "root ::= x"}, "$.format.grammar"),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<a>"],
                "tags": [{"type": "tag", "begin": "<b>", "content": {"type": "any_text"}, "end": ""}],
            },
            "$.format.tags[0].begin",
        ),
        ({"type": "tags_with_separator", "tags": [], "separator": ""}, "$.format.tags"),
        ({"type": "tags_with_separator", "tags": [{"type": "any_text"}], "separator": ""}, "$.format.tags"),
    ],
)
def test_what_a_tag_cannot_have_is_named_with_its_path(format: dict[str, Any], path: str) -> None:
    with pytest.raises(GrammarError) as caught:
        check("structural_tag", json.dumps({"type": "structural_tag", "format": format}))
    assert caught.value.message.startswith(f"{path}: "), caught.value.message

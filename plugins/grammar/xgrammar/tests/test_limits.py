"""Hostile grammars are refused at once, with the bound in the message, or are small enough to compile."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from tokenspeed_plugin_grammar_xgrammar.backend import XGrammarBackend
from tokenspeed_plugin_grammar_xgrammar.checker import check

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.grammar import GrammarContext, GrammarRequest
from tokenspeed.messages import SamplingParams
from tokenspeed.runtime.grammar import GrammarStore, SlotGrammars
from tokenspeed.runtime.plan import SlotGrammar, SlotRequest


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def branching(levels: int, width: int) -> dict[str, Any]:
    if not levels:
        return {"type": "string"}
    inner = branching(levels - 1, width)
    return {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": i}, "v": inner}, "required": ["k", "v"]}
            for i in range(width)
        ]
    }


def product(levels: int) -> dict[str, Any]:
    return {
        "allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(4)]} for i in range(levels)],
        "type": "object",
    }


def doubling(levels: int) -> dict[str, Any]:
    definitions = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}", "title": "b"}]}
        for i in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{levels}": {"type": "null"}}}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


_NESTED_TOO_DEEP = '{"items":' * 5000 + "true" + "}" * 5000

REFUSED: list[tuple[str, str, str]] = [
    ("json_schema", json.dumps(nested(300)), "32 deep"),
    ("json_schema", _NESTED_TOO_DEEP, "deep"),
    ("json_schema", json.dumps({"enum": [f"value-{i}" for i in range(10_000)]}), "1000 are allowed"),
    ("json_schema", json.dumps({"enum": ["x" * 1000 + str(i) for i in range(100)]}), "characters"),
    ("json_schema", json.dumps({"const": "x" * 100_000}), "characters"),
    ("json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(300)}}), "100 are allowed"),
    (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(30)}, "minProperties": 2}),
        "10 are allowed",
    ),
    ("json_schema", json.dumps({"type": "string", "maxLength": 10**9}), "1000"),
    ("json_schema", json.dumps({"type": "array", "minItems": 10**6}), "1000"),
    ("json_schema", json.dumps(branching(8, 4)), "characters|schemas|properties"),
    ("json_schema", json.dumps(product(12)), "2000 schemas|200 properties"),
    ("json_schema", json.dumps({"type": "string", "pattern": "^((a{1000}){1000})$"}), "positions"),
    (
        "json_schema",
        json.dumps({"pattern": "(a*)*" * 40 + "b", "enum": ["a" * 300 + str(i) for i in range(100)]}),
        "too long",
    ),
    ("json_schema", " " * 300_000, "262144"),
    (
        "json_schema",
        json.dumps(
            {
                "allOf": [{"$ref": "#/$defs/n"}, {"type": "object"}],
                "$defs": {"n": {"properties": {"k": {"allOf": [{"$ref": "#/$defs/n"}, {}], "minProperties": 1}}}},
            }
        ),
        "endless",
    ),
    ("json_schema", '{"const": 1, "$ref": "#"}', "endlessly"),
    ("json_schema", '{"const": 1, "anyOf": [{"$ref": "#"}]}', "endlessly"),
    ("json_schema", '{"enum": [1, [1e400]]}', r"\$.enum: a number is beyond what a double holds"),
    ("json_schema", '{"type": "string", "pattern": "[]"}', r"\$.pattern: matches no string"),
    ("choice", json.dumps([f"c{i}" for i in range(20_000)]), "1000"),
    ("regex", "a" * 9000, "8192"),
    ("ebnf", 'root ::= "' + "a" * 70_000 + '"', "65536"),
    ("ebnf", 'root ::= (("a"{1,100}){1,100}){1,100}', "1000 are allowed"),
    ("ebnf", "root ::= " + "(" * 40 + '"a"' + ")" * 40, "32 deep"),
    ("ebnf", "root ::= a", "not defined"),
    ("ebnf", "root ::= root", "no finite text matches rule 'root'"),
    ("ebnf", "root ::= a\na ::= b\nb ::= a", "no finite text matches rule 'root'"),
    ("ebnf", 'root ::= "x" | "a" b\nb ::= ("c" b){1,2} | b+', "no finite text matches rule 'b'"),
    ("ebnf", 'root ::= "a" []', "empty class"),
    (
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": {"type": "grammar", "grammar": "root ::= root"}}),
        r"\$.format.grammar: no finite text matches rule 'root'",
    ),
    ("json_schema", json.dumps({"enum": [deep(33)]}), r"\$.enum: values nested more than 32 deep"),
    ("json_schema", json.dumps({"items": {"const": deep(900)}}), r"\$.items.const: values nested more than 32 deep"),
    *(
        ("json_schema", f'{{"{key}": {sign}1{"0" * 400}}}', rf"\$.{key}: must be a .*number.* that a double holds")
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        for sign in ("", "-")
    ),
    *(
        ("json_schema", json.dumps({key: 10**400}), rf"\$.{key}: must be a whole number")
        for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
    ),
    (
        "structural_tag",
        json.dumps(
            {
                "type": "structural_tag",
                "format": {"type": "repeat", "min": 0, "max": 10**6, "content": {"type": "any_text"}},
            }
        ),
        "1000",
    ),
    (
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": [{"type": "any_text"}] * 2000}}),
        "1000 formats",
    ),
]


@pytest.mark.parametrize(
    ("kind", "value", "reason"), REFUSED, ids=[f"{kind}-{reason}-{i}" for i, (kind, _, reason) in enumerate(REFUSED)]
)
def test_what_is_too_large_is_refused_quickly_with_its_bound(kind: str, value: str, reason: str) -> None:
    begin = time.process_time()
    with pytest.raises(GrammarError, match=reason):
        check(kind, value)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "(" root? ")"',
        'root ::= (root "a"){0,2} "b"',
        "root ::= root*",
        'root ::= a | "x" # | root\na ::= a "a" | [|] (b)+\nb ::= "" | root b',
        'root ::= TagDispatch(("a", x), loop_after_dispatch=true)\nx ::= "b" | x "c"',
        "root ::= "
        + " ".join(f"r{i}" for i in range(2000))
        + "\n"
        + "\n".join(f"r{i} ::= r{i + 1}" for i in range(1999))
        + '\nr1999 ::= ""',
    ],
    ids=["optional", "counted", "starred", "mixed", "macro", "long"],
)
def test_rules_that_lead_back_to_themselves_and_end_are_taken_quickly(text: str) -> None:
    begin = time.process_time()
    check("ebnf", text)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("schema", [nested(30), branching(3, 3), doubling(12)], ids=["nested", "branching", "doubling"])
def test_what_is_within_the_bounds_is_taken_quickly(schema: dict[str, Any]) -> None:
    begin = time.process_time()
    check("json_schema", json.dumps(schema))
    assert time.process_time() - begin < 1


_STOP = 20_257
_VOCABULARY = [*(bytes((byte,)) for byte in range(256)), *(b"a%d" % i for i in range(20_001)), b""]


class _Drawn:
    """One token that is there."""

    def wait(self) -> np.ndarray:
        return np.array([[ord("a")]], dtype=np.int64)


def backend() -> XGrammarBackend:
    return XGrammarBackend(GrammarContext(vocabulary=_VOCABULARY, vocab_size=len(_VOCABULARY), stop_token_ids=(_STOP,)))


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ('root ::= s\ns ::= s s | "a"', True),
        ('root ::= e\ne ::= "a" | e "a" e | e e | "(" e ")"', True),
        ('root ::= "a" root | "a"', False),
    ],
    ids=["pairs", "expression", "unambiguous"],
)
def test_an_ambiguous_grammar_ends_its_request_before_a_step_takes_long(text: str, ends: bool) -> None:
    made = backend()
    data = made.serialize(made.compile(GrammarRequest(kind="ebnf", value=text)))
    machine = SlotGrammars(GrammarStore(made), max_slots=1, vocab_size=len(_VOCABULARY), stop_ids=(_STOP,))
    machine.load(SlotRequest(0, SamplingParams(64), 0, (_STOP,), b"", b"", 1, SlotGrammar(b"k", data)))
    slot, slowest, faults = np.array([0], dtype=np.int32), 0.0, dict[int, str]()
    for _ in range(700):
        begin = time.thread_time()
        faults = machine.masks(slot).faults
        slowest = max(slowest, time.thread_time() - begin)
        if faults:
            break
        machine.drawn(slot, _Drawn())
    assert bool(faults) is ends
    assert slowest < 0.25
    if ends:
        assert "ambiguous" in faults[0]


def test_what_a_grammar_says_of_its_memory_is_more_than_what_it_takes_on_the_way() -> None:
    made = backend()
    compiled = made.compile(GrammarRequest(kind="json_schema", value='{"type": "object", "properties": {"a": {}}}'))
    data = made.serialize(compiled)
    assert made.deserialize(data).nbytes > 20 * len(data)

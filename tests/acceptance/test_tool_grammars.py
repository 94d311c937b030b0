"""What a tool format's grammar lets a model write, its parser reads: random walks through the grammars of random tools, for every family.

Walks like markers and quotes best, so that what a schema leaves free is filled with what could confuse a parser.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from tokenspeed.interfaces.grammar import GrammarContext, GrammarRequest, mask_words
from tokenspeed.interfaces.parser import ParserContext, ToolParser
from tokenspeed.interfaces.parsing import is_complete

xgrammar = pytest.importorskip("tokenspeed_plugin_grammar_xgrammar.backend", reason="needs the xgrammar plugin")
checker = pytest.importorskip("tokenspeed_plugin_grammar_xgrammar.checker", reason="needs the xgrammar plugin")

_P = "tokenspeed_plugin_parsers_"
#: Class, and the markers that are special tokens in the family's vocabularies.
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes": (f"{_P}hermes.parser:HermesToolParser", ()),
    "json": (f"{_P}json.tools:JsonToolParser", ()),
    "llama3_json": (f"{_P}llama.json_calls:LlamaJsonToolParser", ("<|python_tag|>",)),
    "pythonic": (f"{_P}llama.pythonic:PythonicToolParser", ("<|python_start|>", "<|python_end|>")),
    "mistral": (f"{_P}mistral.tools:MistralToolParser", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "qwen3_coder": (f"{_P}qwen.coder:QwenCoderToolParser", ()),
    "glm45": (f"{_P}glm.tools:GlmToolParser", ("<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>")),
    "minimax_m2": (f"{_P}minimax.tools:MiniMaxToolParser", ("<minimax:tool_call>", "</minimax:tool_call>")),
    "deepseek_v3": (
        f"{_P}deepseek.tools:DeepSeekV3ToolParser",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v31": (
        f"{_P}deepseek.tools:DeepSeekV31ToolParser",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v32": (f"{_P}deepseek.dsml:DsmlToolParser", ("｜DSML｜",)),
    "kimi_k2": (
        f"{_P}kimi.tools:KimiK2ToolParser",
        (
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    "kimi_k3": (f"{_P}kimi.xtml:KimiK3ToolParser", ("<|open|>", "<|close|>", "<|sep|>")),
    "gpt_oss": (
        f"{_P}gpt_oss.parsers:HarmonyToolParser",
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
    ),
}
#: Text that walks try to write wherever they may.
_NASTY = (
    "</tool_call>", "<tool_call>", "</function>", "<parameter=", "</parameter>", "<arg_key>", "</arg_value>", "</invoke>", "<invoke name=", "&amp;",
    "<|open|>call", "<|close|>call", "<|close|>argument<|sep|>",
    "</｜DSML｜invoke>", "<｜DSML｜parameter", "\n</", '{"name": "', '"}', "}}", "]", "[ARGS]", "<|call|>", "<|end|>", "```", "null", " ", "\n\n", "\\",
)  # fmt: skip
HELD = ("f", "get_it", "a.b-c")
#: The end of a text.
STOP = 256
#: What walks that have become long prefer.
_CLOSING = frozenset(b'"}]<>/')


class Walker:
    """Random texts of a grammar over bytes and a family's special tokens."""

    def __init__(self, special: Sequence[str]) -> None:
        self.texts = [bytes((i,)) for i in range(256)] + [b""] + [text.encode() for text in special]
        self.size = len(self.texts)
        special_ids = {text: 257 + at for at, text in enumerate(special)}
        vocabulary = [*self.texts[:256], *[b""] * (self.size - 256)]
        self.backend = xgrammar.XGrammarBackend(
            GrammarContext(
                vocabulary=vocabulary,
                vocab_size=self.size,
                stop_token_ids=(STOP,),
                special_token_ids={"<eos>": STOP, **special_ids},
            )
        )

    def text(self, tag: Mapping[str, Any], rng: random.Random, limit: int = 1500) -> str | None:
        """A text that ends by itself; ``None`` if the walk did not within ``limit`` tokens."""
        value = json.dumps(tag, ensure_ascii=False)
        checker.check("structural_tag", value)
        matcher = self.backend.compile(GrammarRequest(kind="structural_tag", value=value)).matcher()
        mask = np.zeros((1, mask_words(self.size)), dtype=np.int32)
        out: list[bytes] = []
        planned: list[int] = []
        while len(out) < limit:
            allowed = np.arange(self.size)
            if matcher.fill_mask(mask, 0):
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.size])
            token = self._next(set(allowed.tolist()), planned, rng, hurry=len(out) / limit)
            if token == STOP:
                return b"".join(out).decode("utf-8", "replace")
            assert matcher.accept(token)
            out.append(self.texts[token])
        return None

    def _next(self, allowed: set[int], planned: list[int], rng: random.Random, *, hurry: float) -> int:
        if planned and planned[0] in allowed and planned[0] != STOP:
            return planned.pop(0)
        planned.clear()
        if STOP in allowed and (len(allowed) == 1 or rng.random() < 0.3 + hurry):
            return STOP
        if len(allowed) > 20 and rng.random() < 0.3 * (1 - hurry):
            planned.extend(rng.choice(_NASTY).encode())
            if planned[0] in allowed:
                return planned.pop(0)
        closing = [token for token in allowed if token > STOP or token in _CLOSING]
        if closing and rng.random() < 0.2 + 0.7 * hurry:
            return rng.choice(sorted(closing))
        plain = sorted(token for token in allowed if 32 <= token < 127 or token == 10 or token > STOP)
        return rng.choice(plain or sorted(allowed - {STOP}))


@cache
def walker(family: str) -> Walker:
    return Walker(FAMILIES[family][1])


def parser_of(family: str) -> type[ToolParser]:
    module, _, name = FAMILIES[family][0].partition(":")
    found: type[ToolParser] = getattr(importlib.import_module(module), name)
    return found


_LEAVES: tuple[dict[str, Any], ...] = (
    {"type": "string"}, {"type": "string"}, {"type": "string", "maxLength": 5}, {"type": "string", "pattern": "^[a-z]{2,4}$"},
    {"type": "integer"}, {"type": "integer", "minimum": 0, "maximum": 12}, {"type": "number"}, {"type": "boolean"}, {"type": "null"},
    {"enum": ["a", "b c", "null", "1"]}, {"enum": ["x", 1, None, True]}, {"const": 3}, {"type": ["string", "null"]},
    {"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"type": "array", "items": {"type": "string"}, "maxItems": 2},
)  # fmt: skip


#: What names begin with, and those of arguments where a family's format bounds them.
_KEYS = ("k", "größe", "a-b", "x y")
KEYS = {"pythonic": ("k", "größe", "a_b", "Xy")}


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if depth < 2 and kind < 0.15:
        return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": 3}
    return random_object(rng, depth + 1) if depth < 2 and kind < 0.35 else dict(rng.choice(_LEAVES))


def random_object(rng: random.Random, depth: int = 0, keys: tuple[str, ...] = _KEYS) -> dict[str, Any]:
    keys = tuple(rng.choice(keys) + str(at) for at in range(rng.randrange(4)))
    return {
        "type": "object",
        "properties": {key: random_schema(rng, depth) for key in keys},
        "required": [key for key in keys if rng.random() < 0.6],
        "additionalProperties": False,
    }


def random_tools(rng: random.Random, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Three tools, some of which take any object or no arguments; their names begin with ``keys``."""
    tools = []
    for name in HELD:
        function: dict[str, Any] = {"name": name, "parameters": random_object(rng, 0, keys)}
        if (kind := rng.random()) < 0.2:
            function["parameters"] = {"type": "object"}
        elif kind < 0.3:
            del function["parameters"]
        tools.append({"type": "function", "function": function})
    return tools


def read(parser: type[ToolParser], tools: list[dict[str, Any]], text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text."""
    one = parser(ParserContext(tools=tools, prompt_tail="<|start|>assistant", constrained=True, held=frozenset(HELD)))
    content, calls = "", []
    for delta in (one.feed(text), one.finish()):
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                calls.append((call.name, ""))
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    return content, calls


def check_walks(family: str, seeds: range) -> int:
    parser, ended = parser_of(family), 0
    for seed in seeds:
        rng = random.Random(seed)
        tools = random_tools(rng, KEYS.get(family, _KEYS))
        required, parallel, names = rng.random() < 0.8, rng.random() < 0.5, rng.choice((None, ("get_it",)))
        tag = parser.structural_tag(tools, names=names, required=required, parallel=parallel)
        assert tag is not None
        text = walker(family).text(tag, rng)
        if text is None:
            continue
        ended += 1
        content, calls = read(parser, tools, text)
        about = f"seed {seed}: {text!r} of {json.dumps(tools)}: {calls}"
        assert not (required and content), about
        assert len(calls) >= required, about
        assert parallel or len(calls) <= 1, about
        schemas = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in tools}
        for name, arguments in calls:
            assert names is None or name in names, about
            assert is_complete(arguments), about
            jsonschema.validate(json.loads(arguments), schemas[name])
    return ended


@pytest.mark.parametrize("family", FAMILIES)
def test_parsers_read_what_grammars_let_through(family: str) -> None:
    """Complete calls of the allowed functions, at least one where required, one at most where not parallel, arguments valid, and no content besides."""
    assert check_walks(family, range(12)) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_parsers_read_what_grammars_let_through_in_many_walks(family: str) -> None:
    """The same, 300 times."""
    assert check_walks(family, range(1000, 1300)) >= 150


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_grammars_must_not_let_through(family: str) -> None:
    """With strict tools under auto there is any text, but no call other than the tools': what the family writes for an undeclared one is rejected, or is
    text to the parser as well."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    other = json.loads(json.dumps(tools).replace('"f"', '"g"'))
    parser, one = parser_of(family), walker(family)
    held = parser.structural_tag(tools, required=False, parallel=True)
    rng = random.Random(1)
    tag = parser.structural_tag(other, required=True, parallel=False)
    assert held is not None
    assert tag is not None
    text = one.text(tag, rng)
    assert text is not None
    value = json.dumps(held, ensure_ascii=False)
    matcher = one.backend.compile(GrammarRequest(kind="structural_tag", value=value)).matcher()
    hello = list(b"a < b, {1} [2]\n") if family != "gpt_oss" else list(b"<|channel|>final<|message|>a < b")
    assert all(matcher.accept(token) for token in hello)
    assert not all(matcher.accept(token) for token in text.encode()) or not read(parser, tools, text)[1]

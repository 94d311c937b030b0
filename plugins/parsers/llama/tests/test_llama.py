"""Llama formats: the rules of both suites, and what is special here."""

from __future__ import annotations

import json

import pytest
from tokenspeed_plugin_parsers_llama.json_calls import LlamaJsonToolParser
from tokenspeed_plugin_parsers_llama.pythonic import PythonicToolParser

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.testing.tool_parser import PLAIN_TEXTS, Parsed, Sample, ToolParserSuite, parse
from tokenspeed.testing.tool_parser_gaps import ToolParserGaps

A, B = '{"name": "a", "parameters": {}}', '{"name": "b", "parameters": {"x": 1}}'


def read(parser, text: str) -> Parsed:
    whole = parse(parser(ParserContext()), [text])
    assert parse(parser(ParserContext()), list(text)) == whole
    return whole


class TestJson(ToolParserSuite):
    parser = LlamaJsonToolParser
    markers = ("<|python_tag|>", "<|eom_id|>", "<|eot_id|>")
    plain = (
        *PLAIN_TEXTS,
        '{"name": 1}',
        '{"name": "Bob"}',
        '{"type": "x", "k": {}}',
        '{"n',
        "use {x} and {y}",
        '[{"k": 1}]',
        "[{",
        '{"name"',
    )
    samples = (
        Sample(A, calls=(("a", {}),), verbatim=("{}",)),
        Sample(f"<|python_tag|>{B}<|eom_id|>", calls=(("b", {"x": 1}),)),
        Sample(f"{A}; {B}", calls=(("a", {}), ("b", {"x": 1}))),
        Sample('{"type": "function", "name": "a", "arguments": {"t": "}"}}', calls=(("a", {"t": "}"}),)),
        Sample(f"[{A},\n{B}]", calls=(("a", {}), ("b", {"x": 1}))),
        Sample(f"Sure: {A}", content="Sure:", calls=(("a", {}),)),
    )

    def test_plain_text_comes_back_unchanged_and_in_time(self) -> None:
        """The beginning of a call takes the place of a marker: text is held back no longer than it could be one."""
        for text in self.plain:
            assert read(LlamaJsonToolParser, text) == Parsed(content=text)
        parser, told = self.make(), 0
        for at, char in enumerate("no call, a < b, {k: 1}, [1, 2]" * 3):
            told += len(parser.feed(char).content)
            assert at + 1 - told <= 4


class TestJsonGaps(ToolParserGaps):
    parser = LlamaJsonToolParser
    quotable = "a <|eom_id|> ; b"

    def render(self, calls):
        return "; ".join(
            json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False) for name, arguments in calls
        )


def test_tool_09_real_json_decoding() -> None:
    """tool-09: depth and braces in strings do not matter."""
    text = '{"name": "score", "parameters": {"rec": {"a": {"b": [1, {"c": "}"}]}}}}'
    assert read(LlamaJsonToolParser, text).finished() == [("score", {"rec": {"a": {"b": [1, {"c": "}"}]}}})]


@pytest.mark.parametrize("separator", [";", "\n", " ; ", ";\n\n", "; ", ""])
def test_tool_10_any_separator(separator: str) -> None:
    """tool-10: any run of semicolons and white space separates calls."""
    assert read(LlamaJsonToolParser, f"{A}{separator}{B}").finished() == [("a", {}), ("b", {"x": 1})]


def test_tool_10_braces_in_later_prose_are_content() -> None:
    """tool-10: a valid call is not thrown away because the text behind it has braces."""
    parsed = read(LlamaJsonToolParser, f"{A} I used {{a}} here.")
    assert (parsed.finished(), parsed.content) == ([("a", {})], "I used {a} here.")


def test_arguments_that_break_are_content() -> None:
    """The call was told already: it stays unfinished, and its whole text is content."""
    parsed = read(LlamaJsonToolParser, '{"name": "a", "parameters": {"x": oops}}')
    assert (parsed.finished(), parsed.content) == ([], '{"name": "a", "parameters": {"x": oops}}')


class TestPythonic(ToolParserSuite):
    parser = PythonicToolParser
    markers = ("<|python_start|>", "<|python_end|>")
    plain = (*PLAIN_TEXTS, "[link](http://x)", "[f(x)]", "x[f(a=1)]", "[f(a==1)]", "[f(", "[f", "[a, b]", "[f (a=1)]")
    samples = (
        Sample("[now()]", calls=(("now", {}),), verbatim=("{}",)),
        Sample('[f(a=1, b="x"), g()]', calls=(("f", {"a": 1, "b": "x"}), ("g", {}))),
        Sample(
            "<|python_start|>[f(q=[\"a)\", \"b]\"], d={'k': [-1, None]}, t='it\\'s')]<|python_end|>",
            calls=(("f", {"q": ["a)", "b]"], "d": {"k": [-1, None]}, "t": "it's"}),),
        ),
        Sample(
            "Sure.\n[f(a=True, b=(1, 2.50), c='''x\n\"y\"''', d=1_000, e=0x1F,)]",
            content="Sure.",
            calls=(("f", {"a": True, "b": [1, 2.5], "c": 'x\n"y"', "d": 1000, "e": 31}),),
        ),
        Sample(
            "[ns.f(a='\\u00fc\\x41\\n', b='', c=[], d={})]", calls=(("ns.f", {"a": "üA\n", "b": "", "c": [], "d": {}}),)
        ),
    )


class TestPythonicGaps(ToolParserGaps):
    parser = PythonicToolParser
    quotable = "a ) ] <|python_end|> b"

    def render(self, calls):
        return (
            "["
            + ", ".join(
                f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
                for name, arguments in calls
            )
            + "]"
        )


@pytest.mark.parametrize(
    "value", ["os.system('x')", "1 + 1", "f'{x}'", "{1, 2}", "lambda: 0", "[1", "-", "1__", "07", "x"]
)
def test_tool_12_code_is_never_a_call(value: str) -> None:
    """tool-12: what is no literal is content, and nothing of it is evaluated."""
    parsed = read(PythonicToolParser, f"[f(a={value})]")
    assert parsed.finished() == []
    assert parsed.content in (f"[f(a={value})]", "")


def test_a_comprehension_is_no_call() -> None:
    """A call counts only when a comma or the end of the list follows it."""
    parsed = read(PythonicToolParser, "[f(a=1) for x in y]")
    assert (parsed.finished(), parsed.content) == ([], "[f(a=1) for x in y]")


def tool(name: str, parameters: object = None) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def pythonic_tag(parameters: object) -> str:
    return json.dumps(PythonicToolParser.structural_tag([tool("f", parameters)], required=True, parallel=True))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f(a=1)]", [("f", {"a": 1})]),
        ("see[f(a=1)]", [("f", {"a": 1})]),
        ("[g(a=1)]", []),
        ("[ f(a=1)]", []),
        (r'[f(a="x\/y\u00fc", b=true, c=None, d=False, e=null)]', [("f", {"a": "x/yü", "b": True, "c": None, "d": False, "e": None})]),
        ('[f(a={"f(b=": [true, 1e3]}), f()]', [("f", {"a": {"f(b=": [True, 1000.0]}}), ("f", {})]),
    ],
)  # fmt: skip
def test_constrained_lists_begin_with_a_declared_function_and_hold_json(text: str, calls: list) -> None:
    """That is what the grammar holds the model to: other lists are its text, also where they look like calls, and strings have the escapes of JSON."""
    ctx = ParserContext(tools=[tool("f")], constrained=True)
    for pieces in ([text], list(text)):
        parsed = parse(PythonicToolParser(ctx), pieces)
        assert parsed.finished() == calls
        assert calls or parsed.content == text


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"type": "object", "properties": {"a": {}}, "allOf": [{}]}, "allOf"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "minProperties"),
        ({"type": "array"}, "object"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "'a'"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, "#/properties/b"),
        ({"type": "object", "properties": {"a b": {}}}, "'a b'"),
        ({"type": "object", "properties": {f"k{at}": {} for at in range(21)}}, "optional arguments"),
    ],
)
def test_what_keyword_arguments_cannot_be_held_to_is_refused_by_its_tool(parameters: dict, why: str) -> None:
    """The error names the tool's parameters, so that a tool that is not strict can be held to less."""
    with pytest.raises(GrammarError, match=why) as caught:
        pythonic_tag(parameters)
    assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("name", ["1st", "-x", "x" * 129])
def test_a_name_that_python_would_not_take_is_refused(name: str) -> None:
    with pytest.raises(GrammarError) as caught:
        PythonicToolParser.structural_tag([tool("f"), tool(name)], required=True, parallel=True)
    assert caught.value.param == "tools[1].function.name"


def test_values_take_their_definitions_along_and_truth_is_spelled_as_in_python() -> None:
    text = pythonic_tag(
        {
            "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"type": "boolean", "description": "?"}},
            "$defs": {"x": {"type": "null"}},
        }
    )
    assert '{"$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}}' in text
    assert '"value": "True"' in text
    assert '"value": "False"' in text


def test_text_around_constrained_lists_holds_no_call_that_may_not_be_made() -> None:
    """A declared function that is not among the allowed ones is no text either."""
    tag = PythonicToolParser.structural_tag([tool("f"), tool("g")], names=("f",), required=False, parallel=True)
    assert '"excludes": ["[f(", "[g("]' in json.dumps(tag)

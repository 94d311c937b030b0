"""What conformance suites of tool parsers seldom ask: a second suite, for formats that can be written down by a function.

A plugin subclasses ``ToolParserGaps`` beside ``ToolParserSuite`` and says how its format writes calls::

    class TestHermesGaps(ToolParserGaps):
        parser = HermesToolParser

        def render(self, calls):
            return "\\n".join(f"<tool_call>\\n{json.dumps({'name': n, 'arguments': a})}\\n</tool_call>" for n, a in calls)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.interfaces.parser import ParserContext, ToolParser
from tokenspeed.interfaces.parsing import is_complete
from tokenspeed.testing.tool_parser import Parsed, parse

__all__ = ["TOOLS", "ToolParserGaps", "function"]

Call = tuple[str, Mapping[str, Any]]


def function(name: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of a request, with the schemas of its parameters."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


#: The tool that random calls are made of: one parameter of each type.
TOOLS = (
    function(
        "probe",
        text={"type": "string"},
        count={"type": "integer"},
        ratio={"type": "number"},
        flag={"type": "boolean"},
        items={"type": "array"},
        record={"type": "object"},
        maybe={"anyOf": [{"type": "string"}, {"type": "null"}]},
    ),
)

_BIG = 10**400 + 7


def _values(texts: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts
    )
    nested = st.recursive(
        scalars,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
        max_leaves=8,
    )
    return st.fixed_dictionaries(
        {},
        optional={
            "text": texts,
            "count": st.integers(),
            "ratio": st.floats(allow_nan=False, allow_infinity=False),
            "flag": st.booleans(),
            "items": st.lists(nested, max_size=3),
            "record": st.dictionaries(texts, nested, max_size=3),
            "maybe": st.one_of(st.none(), texts.filter(lambda text: text != "null")),
        },
    )


class ToolParserGaps(ABC):
    """Subclass it with the attributes below.

    Attributes:
        parser: the parser's class or factory.
        quotable: a text that may stand in a string value: marker text for formats whose values are JSON.
        alphabet: characters of random strings.
    """

    parser: ClassVar[Callable[[ParserContext], ToolParser]]
    quotable: ClassVar[str] = "a <b> & 'c' \"d\" {e} \\ ü"
    alphabet: ClassVar[str] = "ab01 .,:;{}[]()'\"\\&\t\n日ü😀-"

    @abstractmethod
    def render(self, calls: Sequence[Call]) -> str:
        """What a model writes for these calls."""

    def read(self, text: str, size: int | None = None) -> Parsed:
        """Parse with the tools of this suite, in pieces of ``size`` characters."""
        pieces = [text] if size is None else [text[at : at + size] for at in range(0, len(text), size)]
        return parse(type(self).parser(ParserContext(tools=TOOLS)), pieces)

    def test_random_calls_come_back(self) -> None:
        """Names, order and values of any calls survive the format, with the types of the schema."""

        @settings(max_examples=60, deadline=None, derandomize=True, database=None)
        @given(
            st.lists(_values(st.text(self.alphabet, max_size=8)), min_size=1, max_size=3),
            st.sampled_from([1, 3, 7, None]),
        )
        def check(arguments: list[dict[str, Any]], size: int | None) -> None:
            calls = [("probe", values) for values in arguments]
            parsed = self.read(self.render(calls), size)
            assert parsed.finished() == calls
            assert parsed.content.strip() == ""

        check()

    def test_a_name_of_any_language_is_kept(self) -> None:
        """Names outside ASCII, and names that no tool of the request has, are passed on."""
        for name in ("größe", "天気", "web-find", "a_b"):
            assert self.read(self.render([(name, {})]), 1).finished() == [(name, {})]

    def test_an_empty_name_is_no_call(self) -> None:
        """A call without a name is told to nobody."""
        assert self.read(self.render([("", {})])).finished() == []

    def test_large_arguments_arrive_in_pieces(self) -> None:
        """20 kB of text stream: the parts told on the way add up, and none is withheld to the end."""
        value = (self.quotable + "\n") * (20_000 // len(self.quotable))
        text = self.render([("probe", {"text": value.strip()})])
        parser = type(self).parser(ParserContext(tools=TOOLS))
        parsed = Parsed()
        for at in range(0, len(text), 100):
            parsed.take(parser.feed(text[at : at + 100]))
            if 10_000 < at < 15_000:
                assert len(parsed.calls[0][2]) > at - 1000
        parsed.take(parser.finish())
        assert parsed.finished() == [("probe", {"text": value.strip()})]

    def test_numbers_of_any_size_keep_their_digits(self) -> None:
        """Neither 9007199254740993 nor 10**400 + 7 is rounded; a fraction stays as it was written."""
        for number in (9007199254740993, -_BIG):
            calls = [("probe", {"count": number})]
            assert self.read(self.render(calls)).finished() == calls
        assert "-1.50" in self.read(self.render([("probe", {"ratio": -1.25})]).replace("-1.25", "-1.50")).calls[0][2]

    def test_missing_and_undeclared_arguments_pass(self) -> None:
        """The parser does not validate: no argument is made up, and an undeclared text stays one."""
        assert self.read(self.render([("probe", {})])).finished() == [("probe", {})]
        calls = [("probe", {"flag": True, "other": "text"})]
        assert self.read(self.render(calls)).finished() == calls

    def test_a_string_that_looks_like_something_else_stays_a_string(self) -> None:
        """The schema decides, not the look."""
        for text in ("001", "true", "1e5", "null", "[]", "{}", "NaN"):
            calls = [("probe", {"text": text})]
            assert self.read(self.render(calls)).finished() == calls

    def test_a_cut_call_is_not_complete(self) -> None:
        """At every cut, what was told of an unfinished call is no JSON object, and the finished ones before it stay."""
        calls: list[Call] = [("probe", {"text": "x", "record": {"a": [1, {}]}}), ("probe", {"count": 12})]
        text = self.render(calls)
        for end in range(len(text)):
            parsed = self.read(text[:end])
            assert parsed.finished() == calls[: len(parsed.finished())]
            assert not any(is_complete(call[2]) for call in parsed.calls[len(parsed.finished()) :])

"""Conformance suite of tool-call parsers: what every family must keep, whatever the model writes.

A plugin subclasses ``ToolParserSuite`` in its tests and gives samples of its format::

    class TestHermes(ToolParserSuite):
        parser = HermesToolParser
        markers = ("<tool_call>", "</tool_call>")
        samples = (Sample('<tool_call>\\n{"name": "now", "arguments": {}}\\n</tool_call>', calls=(("now", {}),)),)
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.parser import ParserContext, ParserDelta, ToolParser
from tokenspeed.testing.tag_texts import TagTexts
from tokenspeed.testing.tag_tools import Draw, fits, leaves, random_tools, with_random

__all__ = ["Parsed", "Sample", "ToolParserSuite", "parse"]

#: Texts that hold no call in any format.
PLAIN_TEXTS = (
    "a < b and b > c",
    "[1, 2]",
    '{"k": 1}',
    "f(x) = [x, {y}]",
    "<b>bold</b> </b",
    "naïve 日本語 👩‍👩‍👧 <",
    "line one\n\n  line two\n",
    " leading, trailing ",
)


@dataclass(frozen=True)
class Sample:
    """An output of a model and what it means.

    Attributes:
        calls: (name, arguments) of the finished calls, in order.
        content: visible text.
        tools: the request's tools, where the format needs their schemas.
        verbatim: argument texts as written, where the format passes them on unchanged.
    """

    text: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    content: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    verbatim: tuple[str, ...] = ()


@dataclass
class Parsed:
    """What a whole stream of deltas amounts to. ``calls`` holds [name, id, arguments] by index."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[Any]] = field(default_factory=list)

    def take(self, delta: ParserDelta) -> None:
        """Add a delta; asserts that calls begin in order, each with its name in its first piece and nowhere else."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        for call in delta.calls:
            if call.index == len(self.calls):
                assert call.name, "a call begins with its name"
                self.calls.append([call.name, call.id, call.arguments])
                continue
            assert 0 <= call.index < len(self.calls), f"index {call.index} leaves a gap"
            assert call.name is None, "a name comes once"
            assert call.id is None, "an id comes once"
            self.calls[call.index][2] += call.arguments

    def finished(self) -> list[tuple[str, Any]]:
        """(name, arguments) of the calls whose arguments are a JSON object."""
        done = []
        for name, _, arguments in self.calls:
            value = _object(arguments)
            if value is not None:
                done.append((name, value))
        return done


def _object(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def parse(parser: ToolParser, pieces: Sequence[str]) -> Parsed:
    """Feed all pieces and finish."""
    parsed = Parsed()
    for piece in pieces:
        parsed.take(parser.feed(piece))
    parsed.take(parser.finish())
    return parsed


_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}


def _without_excludes(format: Any) -> Any:
    """A structural tag without what its texts must not hold."""
    if isinstance(format, list):
        return [_without_excludes(item) for item in format]
    if not isinstance(format, Mapping):
        return format
    return {key: _without_excludes(value) for key, value in format.items() if key != "excludes"}


def _partitions(text: str, seed: int, count: int = 200) -> Iterator[list[str]]:
    """Each character, all two-chunk cuts (of up to 400 places), and ``count`` random cuts."""
    yield list(text)
    for at in range(1, len(text), max(1, len(text) // 400)):
        yield [text[:at], text[at:]]
    rng = random.Random(seed)
    for _ in range(count):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 12)))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


class ToolParserSuite:
    """Subclass it with the attributes below; every test states one rule.

    Attributes:
        parser: the parser's class or factory.
        markers: marker texts of the format.
        samples: outputs and their meaning; several calls, text around calls, nested values, quoted markers.
        plain: texts that come back unchanged.
        slow_texts: further texts for the time limit, repeated to a quarter of a megabyte.
        prompt_tail: end of the prompt behind which constrained calls are read, where the format asks for one.
    """

    parser: ClassVar[Callable[[ParserContext], ToolParser]]
    markers: ClassVar[tuple[str, ...]]
    samples: ClassVar[tuple[Sample, ...]]
    plain: ClassVar[tuple[str, ...]] = PLAIN_TEXTS
    slow_texts: ClassVar[tuple[str, ...]] = ()
    prompt_tail: ClassVar[str] = ""

    def make(self, tools: Sequence[Mapping[str, Any]] = ()) -> ToolParser:
        """A parser of one choice."""
        return type(self).parser(ParserContext(tools=tools))

    def test_samples_mean_what_they_say(self) -> None:
        """Content, names and arguments of each sample, read whole; numbers keep their digits."""
        for sample in self.samples:
            parsed = parse(self.make(sample.tools), [sample.text])
            assert parsed.finished() == [(name, dict(arguments)) for name, arguments in sample.calls], sample.text
            assert parsed.content == sample.content, sample.text
            if sample.verbatim:
                assert [call[2] for call in parsed.calls] == list(sample.verbatim), sample.text

    def test_any_partition_gives_the_same(self) -> None:
        """Deltas concatenate to the same content and calls however the text was cut."""
        for seed, sample in enumerate(self.samples):
            whole = parse(self.make(sample.tools), [sample.text])
            for pieces in _partitions(sample.text, seed):
                assert parse(self.make(sample.tools), pieces) == whole, pieces

    @pytest.mark.slow
    def test_ten_thousand_partitions_give_the_same(self) -> None:
        """As above, with 10,000 random partitions of all samples together."""
        for seed, sample in enumerate(self.samples):
            whole = parse(self.make(sample.tools), [sample.text])
            for pieces in _partitions(sample.text, 1000 + seed, count=10_000 // len(self.samples) + 1):
                assert parse(self.make(sample.tools), pieces) == whole, pieces

    def test_plain_text_comes_back_unchanged_and_in_time(self) -> None:
        """Without markers nothing is lost, and no character waits longer than the longest marker."""
        longest = max(map(len, self.markers))
        for text in self.plain:
            parser, parsed = self.make(), Parsed()
            for at, char in enumerate(text):
                parsed.take(parser.feed(char))
                assert at + 1 - len(parsed.content) <= longest, text
            parsed.take(parser.finish())
            assert parsed == Parsed(content=text)

    def test_a_structural_tag_is_plain_json_of_the_tools_that_may_be_called(self) -> None:
        """Where the format can be constrained: the functions asked for and no others, with and without text around calls; odd names are refused."""
        parser = type(self).parser
        if not isinstance(parser, type) or not issubclass(parser, ToolParser):
            return
        tools = [{"type": "function", "function": {"name": name}} for name in ("get_first", "get_second")]
        for required, parallel in itertools.product((True, False), repeat=2):
            tag = parser.structural_tag(tools, names=("get_second",), required=required, parallel=parallel)
            if tag is None:
                return
            assert json.loads(json.dumps(tag)) == tag
            assert tag.keys() == {"type", "format"}
            assert tag["type"] == "structural_tag"
            named = json.dumps(_without_excludes(tag))
            assert ("get_first" in named, "get_second" in named) == (False, True)
        for name in ("a b", 'a"b', "a<b", "a\nb"):
            with pytest.raises(GrammarError, match=r"tools\[0\]\.function\.name"):
                parser.structural_tag([{"function": {"name": name}}], required=True, parallel=True)

    def test_what_a_structural_tag_lets_through_is_read_as_calls(self) -> None:
        """Random texts of the tags of random tools, strings full of markup: calls of the allowed functions, complete, with the arguments that were written;
        no content where calls are required, and however the text is cut."""
        parser = type(self).parser
        if not isinstance(parser, type) or not issubclass(parser, ToolParser):
            return

        with_random(60, lambda rng, draw: self._check_tag(parser, rng, draw))

    def _check_tag(self, parser: type[ToolParser], rng: random.Random, draw: Draw) -> None:
        tools = random_tools(rng, ("get_it", "look_up2", "f"))
        required, parallel = rng.random() < 0.7, rng.random() < 0.5
        names = rng.choice((None, ("look_up2",), ("f", "get_it")))
        tag = parser.structural_tag(tools, names=names, required=required, parallel=parallel)
        if tag is None:
            return
        texts = TagTexts(rng, draw, self.markers)
        text = texts.text(tag)
        declared = {tool["function"]["name"]: tool["function"].get("parameters", _NO_ARGUMENTS) for tool in tools}
        ctx = ParserContext(tools=tools, prompt_tail=self.prompt_tail, constrained=True, held=frozenset(declared))
        parsed = parse(parser(ctx), [text])
        about = f"the tag of {json.dumps(tools)} accepts {text!r}, which is read as {parsed}"
        assert len(parsed.finished()) == len(parsed.calls), f"a call is not complete: {about}"
        assert len(parsed.calls) >= required, f"no call: {about}"
        assert len(parsed.calls) <= 1 or parallel, f"more than one call: {about}"
        assert not (required and parsed.content), f"text beside calls: {about}"
        for name, arguments in parsed.finished():
            assert name in (names or declared), f"{name!r} may not be called: {about}"
            assert fits(arguments, declared[name]), f"the arguments do not fit: {about}"
        told = leaves([arguments for _, arguments in parsed.finished()])
        assert leaves(texts.values) <= told, f"values are lost: {about}"
        assert parse(parser(ctx), list(text)) == parsed, f"character by character it is another result: {about}"

    def test_a_cut_closing_tag_is_no_content(self) -> None:
        """Where a limit cuts the closing markup of constrained calls, its beginning is not told as text."""
        parser = type(self).parser
        if not isinstance(parser, type) or not issubclass(parser, ToolParser):
            return
        tools = [{"type": "function", "function": {"name": "now"}}]
        tag = parser.structural_tag(tools, required=True, parallel=False)
        if tag is None:
            return

        def check(rng: random.Random, draw: Draw) -> None:
            text = TagTexts(rng, draw, ()).text(tag)
            for end in range(len(text)):
                ctx = ParserContext(
                    tools=tools, prompt_tail=self.prompt_tail, constrained=True, held=frozenset(("now",))
                )
                parsed = parse(parser(ctx), [text[:end]])
                assert not (parsed.finished() and parsed.content), (text[:end], parsed)

        with_random(5, check)

    def test_a_cut_output_keeps_finished_calls(self) -> None:
        """A prefix of a sample (max_tokens) raises nothing, keeps the calls that are complete, and shows no unfinished one as complete."""
        for sample in self.samples:
            complete: list[tuple[str, Any]] = [(name, dict(arguments)) for name, arguments in sample.calls]
            before = 0
            for end in range(len(sample.text) + 1):
                done = parse(self.make(sample.tools), [sample.text[:end]]).finished()
                assert done == complete[: len(done)], sample.text[:end]
                assert len(done) >= before, sample.text[:end]
                before = len(done)

    def test_no_marker_in_content(self) -> None:
        """Markers of the format never reach the client as text, in samples and their prefixes."""
        for sample in self.samples:
            for end in range(len(sample.text) + 1):
                content = parse(self.make(sample.tools), [sample.text[:end]]).content
                assert not any(marker in content for marker in self.markers), sample.text[:end]

    def test_a_call_made_twice_is_two_calls(self) -> None:
        """The same output twice over gives its calls twice."""
        for sample in self.samples:
            once = parse(self.make(sample.tools), [sample.text]).finished()
            if once and not sample.content:
                assert parse(self.make(sample.tools), [f"{sample.text}\n{sample.text}"]).finished() == once * 2

    def test_garbage_never_raises_and_is_split_the_same(self) -> None:
        """Any mixture of markers, pieces of samples and other characters parses, to the same result whole and character by character."""
        pieces = [
            *self.markers,
            *(sample.text[a : a + 9] for sample in self.samples for a in range(0, len(sample.text), 9)),
        ]
        fragment = st.one_of(st.sampled_from(pieces), st.text('{}[]"\\:,<>/ \nab1', max_size=4))

        @settings(max_examples=150, deadline=None, derandomize=True, database=None)
        @given(st.lists(fragment, max_size=12))
        def check(parts: list[str]) -> None:
            text = "".join(parts)
            assert parse(self.make(), list(text)) == parse(self.make(), [text])

        check()

    def test_time_is_linear(self) -> None:
        """The nastiest text takes under a second of CPU a megabyte, and four times the text not much more than four times the time."""
        begins = [sample.text[: len(sample.text) // 2] for sample in self.samples[:3]]
        nasty = [
            *self.markers,
            *(marker[: len(marker) // 2 + 1] for marker in self.markers),
            "{",
            '"',
            "\\",
            "<",
            "[",
            *begins,
            *self.slow_texts,
        ]
        for text in nasty:
            quarter = self._seconds(text * (62_500 // len(text)))
            full = self._seconds(text * (250_000 // len(text)))
            assert full < 0.25, f"{full:.2f} s for a quarter of a megabyte of {text[:40]!r}"
            assert full < 6 * quarter + 0.05, (
                f"{quarter:.3f} s grew to {full:.3f} s for four times the text of {text[:40]!r}"
            )

    def _seconds(self, text: str) -> float:
        """CPU seconds, the better of two runs where the first one is not clearly fast."""
        pieces = [text[at : at + 64] for at in range(0, len(text), 64)]
        best = float("inf")
        for _ in range(2):
            parser = self.make()
            begin = time.process_time()
            for piece in pieces:
                parser.feed(piece)
            parser.finish()
            best = min(best, time.process_time() - begin)
            if best < 0.1:
                break
        return best

"""Conformance suite of reasoning parsers: what every family must keep, whatever the model writes.

A plugin subclasses ``ReasoningParserSuite`` in its tests and gives samples of its format::

    class TestQwen(ReasoningParserSuite):
        parser = QwenReasoningParser
        markers = ("<think>", "</think>")
        samples = (ReasoningSample("<think>a</think>b", reasoning="a", content="b"),)
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.interfaces.reasoning import ReasoningContext, ReasoningParser
from tokenspeed.testing.tag_texts import TagTexts
from tokenspeed.testing.tag_tools import Draw, with_random

__all__ = ["ReasoningParserSuite", "ReasoningSample", "separate"]

#: Texts without markers: content where the prompt opens no block, reasoning where it does.
PLAIN_TEXTS = (
    "Paris",
    "a < b and b > c",
    "[1, 2]",
    '{"k": 1}',
    " leading, trailing ",
    "one\n\n  two\n",
    "日本語 👩‍👩‍👧 <",
)


@dataclass(frozen=True)
class ReasoningSample:
    """An output of a model behind a prompt, and what it means."""

    text: str
    reasoning: str = ""
    content: str = ""
    prompt_tail: str = ""


def separate(parser: ReasoningParser, pieces: Sequence[str]) -> tuple[str, str]:
    """Feed all pieces and finish: ``(reasoning, content)``."""
    deltas = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


def _fed(parser: ReasoningParser, text: str, spans: Sequence[tuple[int, int]], piece: int) -> tuple[str, str]:
    """As ``separate``, with markers that are tokens at ``spans`` and other text in pieces: ``(reasoning, content)``."""
    deltas, at = [], 0
    for begin, end in [*spans, (len(text), len(text))]:
        deltas += [parser.feed(text[cut : min(cut + piece, begin)], []) for cut in range(at, begin, piece)]
        if begin < end:
            deltas.append(parser.feed(text[begin:end], [(0, end - begin)]))
        at = end
    deltas.append(parser.finish())
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


def _partitions(text: str, seed: int, count: int) -> Iterator[list[str]]:
    """Each character, all two-chunk cuts, and ``count`` random cuts."""
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    rng = random.Random(seed)
    for _ in range(count):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 12)))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


class ReasoningParserSuite:
    """Subclass it with the attributes below; every test states one rule.

    Attributes:
        parser: the parser's class or factory.
        markers: marker texts of the format.
        samples: outputs and their meaning.
        open_prompt: end of a prompt that opens the reasoning; empty where the format has none.
        plain_prompt: end of a prompt that does not.
    """

    parser: ClassVar[Callable[[ReasoningContext], ReasoningParser]]
    markers: ClassVar[tuple[str, ...]]
    samples: ClassVar[tuple[ReasoningSample, ...]]
    open_prompt: ClassVar[str] = ""
    plain_prompt: ClassVar[str] = ""

    def make(self, prompt_tail: str = "") -> ReasoningParser:
        """A parser of one choice."""
        return type(self).parser(ReasoningContext(prompt_tail=prompt_tail))

    def test_samples_mean_what_they_say(self) -> None:
        """Reasoning and content of each sample, read whole."""
        for sample in self.samples:
            result = separate(self.make(sample.prompt_tail), [sample.text])
            assert result == (sample.reasoning, sample.content), (sample.prompt_tail, sample.text)

    def _check_partitions(self, seed: int, count: int) -> None:
        for sample in self.samples:
            whole = separate(self.make(sample.prompt_tail), [sample.text])
            for pieces in _partitions(sample.text, seed, count):
                assert separate(self.make(sample.prompt_tail), pieces) == whole, pieces

    def test_any_partition_gives_the_same(self) -> None:
        """Deltas concatenate to the same result however the text was cut."""
        self._check_partitions(1, 200)

    @pytest.mark.slow
    def test_ten_thousand_partitions_give_the_same(self) -> None:
        """As above, with 10,000 random partitions of all samples together."""
        self._check_partitions(2, 10_000 // len(self.samples) + 1)

    def test_text_without_markers_is_content_unless_the_prompt_says_otherwise(self) -> None:
        """It comes back unchanged, and no character waits longer than the longest marker."""
        longest = max(map(len, self.markers))
        for prompt in {self.plain_prompt, self.open_prompt}:
            for text in PLAIN_TEXTS:
                parser, told = self.make(prompt), ""
                for at, char in enumerate(text):
                    delta = parser.feed(char)
                    told += delta.reasoning + delta.content
                    assert at + 1 - len(told) <= longest, text
                last = parser.finish()
                assert told + last.reasoning + last.content == text
                inside = bool(self.open_prompt) and prompt == self.open_prompt
                assert separate(self.make(prompt), [text]) == ((text, "") if inside else ("", text))

    def test_prefixes_raise_nothing_and_show_no_marker(self) -> None:
        """A cut output tells no more than the whole one, and no marker of the format."""
        for sample in self.samples:
            for end in range(len(sample.text) + 1):
                reasoning, content = separate(self.make(sample.prompt_tail), [sample.text[:end]])
                assert not any(marker in reasoning or marker in content for marker in self.markers), sample.text[:end]

    def _prompts(self) -> list[str]:
        return sorted({self.open_prompt, self.plain_prompt, *(sample.prompt_tail for sample in self.samples)})

    def test_where_tokens_tell_the_markers_text_is_none(self) -> None:
        """Told where its marker tokens stand, a parser reads each sample the same; text that spells a marker is then text, cut anywhere. A parser whose
        markers are not single tokens ignores what it is told."""
        for sample in self.samples:
            for piece in (len(sample.text) or 1, 1):
                fed = _fed(self.make(sample.prompt_tail), sample.text, self._places(sample.text), piece)
                assert fed == (sample.reasoning, sample.content), sample.text
        for prompt in self._prompts():
            for marker in self.make().markers if self.make().single_tokens else ():
                text = f"one {marker} two"
                inside = self.make(prompt).inside
                for pieces in ([text], list(text)):
                    parser = self.make(prompt)
                    deltas = [*(parser.feed(piece, []) for piece in pieces), parser.finish()]
                    reasoning = "".join(delta.reasoning for delta in deltas)
                    content = "".join(delta.content for delta in deltas)
                    assert (reasoning if inside else content).endswith(text), (prompt, text)
                    assert not (content if inside else reasoning), (prompt, text)

    def _places(self, text: str) -> list[tuple[int, int]]:
        markers = self.make().markers
        return [match.span() for match in re.finditer("|".join(map(re.escape, markers)), text)] if markers else []

    def test_an_end_from_outside_loses_nothing(self) -> None:
        """``end_reasoning`` in the middle of reasoning tells what was held back as reasoning, and all that follows is content."""
        halves = ["", *(marker[: len(marker) // 2] for marker in self.markers)]
        for prompt, begin, half in itertools.product(self._prompts(), ("", *self.make().markers), halves):
            self._check_end(prompt, begin, f"one {half}")

    def _check_end(self, prompt: str, begin: str, text: str) -> None:
        parser = self.make(prompt)
        deltas = [parser.feed(begin), parser.feed(text)]
        if not parser.inside:
            return
        deltas.append(parser.end_reasoning())
        told = "".join(delta.reasoning for delta in deltas)
        assert told.endswith(text), (prompt, text, told)
        deltas = [parser.feed("the call"), parser.finish()]
        assert "".join(delta.content for delta in deltas) == "the call"
        assert not any(delta.reasoning for delta in deltas)

    def test_an_answer_behind_its_reasoning_is_read_as_the_answer(self) -> None:
        """Random texts of ``answer_format``: the content is the answer, whichever prompt it follows; where markers are tokens, also if it quotes them."""
        for prompt in self._prompts():
            for as_tokens in {False, self.make().single_tokens}:
                with_random(15, lambda rng, draw, p=prompt, t=as_tokens: self._check_answer(p, t, rng, draw))  # type: ignore[misc]

    def _check_answer(self, prompt: str, as_tokens: bool, rng: random.Random, draw: Draw) -> None:
        parser = self.make(prompt)
        ids = {marker: at for at, marker in enumerate(parser.markers)} if as_tokens else {}
        answer = "{'a': %s}" % (rng.choice(parser.markers) if as_tokens else "1")
        format = parser.answer_format({"type": "const_string", "value": answer}, ids)
        texts = TagTexts(rng, draw, [marker[: len(marker) // 2] for marker in self.markers])
        text = texts.text(format)
        piece = rng.choice((1, 5, len(text)))
        if as_tokens:
            reasoning, content = _fed(parser, text, texts.spans, piece)
        else:
            reasoning, content = separate(parser, [text[at : at + piece] for at in range(0, len(text), piece)])
        about = f"behind {prompt!r}, {text!r} is read as {reasoning!r} and {content!r}"
        assert content == answer, about
        assert answer not in reasoning, about

    def test_garbage_is_split_the_same(self) -> None:
        """Any mixture of markers, their pieces and other characters gives the same result whole and character by character."""
        halves = [marker[: len(marker) // 2] for marker in self.markers]
        fragment = st.one_of(st.sampled_from([*self.markers, *halves]), st.text("<>/[]| \nabto=", max_size=4))

        @settings(max_examples=150, deadline=None, derandomize=True, database=None)
        @given(st.lists(fragment, max_size=12), st.sampled_from([self.open_prompt, self.plain_prompt]))
        def check(parts: list[str], prompt: str) -> None:
            text = "".join(parts)
            assert separate(self.make(prompt), list(text)) == separate(self.make(prompt), [text])

        check()

    def test_time_is_linear(self) -> None:
        """A quarter of a megabyte of the nastiest text takes under a quarter of a second of CPU."""
        for text in (*self.markers, *(marker[:-1] for marker in self.markers), "<", "\n", "\n<"):
            for prompt in {self.plain_prompt, self.open_prompt}:
                assert min(self._seconds(prompt, text * (250_000 // len(text))) for _ in range(2)) < 0.25, text

    def _seconds(self, prompt: str, text: str) -> float:
        pieces = [text[at : at + 64] for at in range(0, len(text), 64)]
        parser = self.make(prompt)
        begin = time.process_time()
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        return time.process_time() - begin

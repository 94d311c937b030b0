"""Contract of a reasoning parser (``ReasoningParserSpec``, API 1).

A reasoning parser tells thinking from the answer in the text of one choice. Like a tool parser it is an incremental machine: ``feed`` takes what was
generated since the last call, cut anywhere, ``finish`` flushes, any partition of the text gives the same result, and model output never raises. What
it calls content goes on to the tool parser.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ReasoningContext", "ReasoningDelta", "ReasoningParser"]


@dataclass(frozen=True, kw_only=True)
class ReasoningContext:
    """What a reasoning parser is built from, once per choice.

    Attributes:
        prompt_tail: the end of the rendered prompt (at most 4,096 characters). Its last marker decides whether the text begins inside reasoning:
            neither the parser's name nor a marker somewhere earlier in the conversation does.
    """

    prompt_tail: str = ""


@dataclass(frozen=True)
class ReasoningDelta:
    """What one ``feed`` yields, in order.

    Attributes:
        segments: pieces of text, each with whether it is reasoning; neighbours differ, none is empty.
    """

    segments: tuple[tuple[bool, str], ...] = ()

    @property
    def reasoning(self) -> str:
        """The reasoning of this delta."""
        return "".join(text for inside, text in self.segments if inside)

    @property
    def content(self) -> str:
        """The visible text of this delta."""
        return "".join(text for inside, text in self.segments if not inside)


class ReasoningParser(ABC):
    """Separates reasoning from content."""

    #: Whether the text must keep special tokens (the markers are special tokens of the vocabulary).
    needs_special_tokens: bool = False

    #: The markers of the reasoning.
    markers: tuple[str, ...] = ()

    #: Whether each marker is one token of the vocabulary, so that ``feed`` can be told which ones are real; if not, it ignores what it is told.
    single_tokens: bool = False

    #: The marker behind which the answer begins; empty where no single one says so.
    end_marker: str = ""

    def __init__(self, ctx: ReasoningContext) -> None:
        self.ctx = ctx

    def answer_format(self, answer: Mapping[str, Any], token_ids: Mapping[str, int]) -> Mapping[str, Any]:  # noqa: ARG002 - for families that write markers
        """What may be generated so that the answer, without its reasoning, has the form ``answer``; asked before the first ``feed``.

        Args:
            answer: a format of a structural tag.
            token_ids: ids of the markers that are one token of the vocabulary, by their text; empty unless all are.

        Returns:
            A format of a structural tag: reasoning where there may be some, and then ``answer``.
        """
        return answer

    @property
    @abstractmethod
    def inside(self) -> bool:
        """Whether text that arrives now is reasoning."""

    @abstractmethod
    def feed(self, text: str, marker_spans: Sequence[tuple[int, int]] | None = None) -> ReasoningDelta:
        """Take the next piece of generated text.

        ``marker_spans`` are the ``(begin, end)`` offsets in ``text`` of markers that came as single tokens; then nothing else counts as a marker, so an
        answer or a thought may spell one. Without them (``None``) every marker text counts: the first end marker closes the reasoning, a second
        block is not begun, and marker text never appears in the result. One choice is fed either always with spans or never.
        """

    @abstractmethod
    def finish(self) -> ReasoningDelta:
        """The text is at its end (also when cut by a limit): flush what was held back."""

    @abstractmethod
    def end_reasoning(self) -> ReasoningDelta:
        """Tell what is held back, as what it is now; text still to come is content (a tool call was found)."""

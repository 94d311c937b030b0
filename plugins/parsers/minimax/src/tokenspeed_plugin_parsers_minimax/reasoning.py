"""MiniMax M2 reasoning: the prompt opens ``<think>``, the model writes ``</think>``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parsing import TagReasoningParser
from tokenspeed.interfaces.reasoning import ReasoningContext, ReasoningDelta, ReasoningParser

__all__ = ["MiniMaxAppendThinkParser", "MiniMaxReasoningParser"]


class MiniMaxReasoningParser(TagReasoningParser):
    """Tells reasoning from content."""


class MiniMaxAppendThinkParser(ReasoningParser):
    """Keeps the block in the content, since the template wants it back in the history; a start tag that stood in the prompt is put before it.

    This is for clients that send back content alone. ``inside`` still follows the tags.
    """

    markers = MiniMaxReasoningParser.markers
    end_marker = MiniMaxReasoningParser.end_marker

    def __init__(self, ctx: ReasoningContext) -> None:
        super().__init__(ctx)
        self._tags = MiniMaxReasoningParser(ctx)
        self._missing = "<think>\n" if self._tags.inside else ""

    def answer_format(self, answer: Mapping[str, Any], token_ids: Mapping[str, int]) -> Mapping[str, Any]:
        return self._tags.answer_format(answer, token_ids)

    @property
    def inside(self) -> bool:
        return self._tags.inside

    def feed(self, text: str, marker_spans: Sequence[tuple[int, int]] | None = None) -> ReasoningDelta:
        self._tags.feed(text, marker_spans)
        return self._tell(text)

    def finish(self) -> ReasoningDelta:
        return self._tell("")

    def end_reasoning(self) -> ReasoningDelta:
        self._tags.end_reasoning()
        return self._tell("")

    def _tell(self, text: str) -> ReasoningDelta:
        if not text:
            return ReasoningDelta()
        text, self._missing = self._missing + text, ""
        return ReasoningDelta(((False, text),))

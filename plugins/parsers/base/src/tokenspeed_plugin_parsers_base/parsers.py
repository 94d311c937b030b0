"""Parsers that find nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.interfaces.parser import ParserDelta, ToolParser
from tokenspeed.interfaces.reasoning import ReasoningDelta, ReasoningParser

__all__ = ["BaseReasoningParser", "PassthroughToolParser"]


class BaseReasoningParser(ReasoningParser):
    """All text is content."""

    @property
    def inside(self) -> bool:
        return False

    def feed(self, text: str, marker_spans: Sequence[tuple[int, int]] | None = None) -> ReasoningDelta:  # noqa: ARG002 - the contract's
        return ReasoningDelta(((False, text),)) if text else ReasoningDelta()

    def finish(self) -> ReasoningDelta:
        return ReasoningDelta()

    def end_reasoning(self) -> ReasoningDelta:
        return ReasoningDelta()


class PassthroughToolParser(ToolParser):
    """All text is content."""

    def feed(self, text: str) -> ParserDelta:
        return ParserDelta(content=text)

    def finish(self) -> ParserDelta:
        return ParserDelta()

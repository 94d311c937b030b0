"""Both parsers of gpt-oss: what the harmony reader tells, in their terms."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.interfaces.parser import ParserContext, ParserDelta, ToolParser
from tokenspeed.interfaces.parsing import Output, Segments
from tokenspeed.interfaces.reasoning import ReasoningContext, ReasoningDelta, ReasoningParser
from tokenspeed_plugin_parsers_gpt_oss.reader import Event, HarmonyReader

__all__ = ["HarmonyReasoningParser", "HarmonyToolParser"]


class HarmonyToolParser(ToolParser):
    """Reads calls, and reasoning as well: the two are parts of one grammar, so no reasoning parser stands before this one."""

    needs_special_tokens = True
    reads_reasoning = True

    def __init__(self, ctx: ParserContext) -> None:
        super().__init__(ctx)
        self._out = Output()
        self._reader = HarmonyReader(ctx.prompt_tail, self._take)

    def _take(self, event: Event, text: str) -> None:
        if event is Event.REASONING:
            self._out.reasoning(text)
        elif event is Event.CONTENT:
            self._out.text(text)
        elif event is Event.CALL:
            self._out.begin(text)
        else:
            self._out.arguments(text)

    def feed(self, text: str) -> ParserDelta:
        self._reader.feed(text)
        return self._out.take()

    def finish(self) -> ParserDelta:
        self._reader.finish()
        self._out.flush()
        return self._out.take()


class HarmonyReasoningParser(ReasoningParser):
    """Reads reasoning where no harmony tool parser does: the arguments of a call are then content."""

    needs_special_tokens = True

    def __init__(self, ctx: ReasoningContext) -> None:
        super().__init__(ctx)
        self._segments = Segments()
        self._reader = HarmonyReader(ctx.prompt_tail, self._take)

    def _take(self, event: Event, text: str) -> None:
        if event is not Event.CALL:
            self._segments.add(event is Event.REASONING, text)

    @property
    def inside(self) -> bool:
        return self._reader.reasoning

    def feed(self, text: str, marker_spans: Sequence[tuple[int, int]] | None = None) -> ReasoningDelta:  # noqa: ARG002 - markers are empty
        self._reader.feed(text)
        return self._segments.take()

    def finish(self) -> ReasoningDelta:
        self._reader.finish()
        return self._segments.take()

    def end_reasoning(self) -> ReasoningDelta:
        self._reader.end_reasoning()
        return self._segments.take()

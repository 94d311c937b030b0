"""Both parsers of gpt-oss: what the harmony reader tells, in their terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parser import ParserContext, ParserDelta, ToolParser
from tokenspeed.interfaces.parsing import Output, Segments, structural
from tokenspeed.interfaces.reasoning import ReasoningContext, ReasoningDelta, ReasoningParser
from tokenspeed_plugin_parsers_gpt_oss.reader import Event, HarmonyReader

__all__ = ["HarmonyReasoningParser", "HarmonyToolParser"]


_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_TEXT = structural.text(*_MARKERS)


def _behind_thoughts(last: structural.Format, *, preambles: bool) -> structural.Format:
    """Any number of messages of the analysis, and ``preambles``, and then ``last``: what follows the role that the prompt ends with."""
    thought = structural.one_of(
        *(
            structural.tag(f"<|channel|>{name}<|message|>", _TEXT, "<|end|>")
            for name in (("analysis", "commentary") if preambles else ("analysis",))
        )
    )
    before = structural.sequence(thought, structural.const("<|start|>assistant"))
    return structural.sequence({"type": "star", "content": before}, last)


def _final(answer: structural.Format) -> structural.Format:
    """The message of the answer."""
    return structural.tag("<|channel|>final<|message|>", answer, "")


class HarmonyToolParser(ToolParser):
    """Reads calls, and reasoning as well: the two are parts of one grammar, so no reasoning parser stands before this one."""

    needs_special_tokens = True
    reads_reasoning = True

    def __init__(self, ctx: ParserContext) -> None:
        super().__init__(ctx)
        self._out = Output()
        self._reader = HarmonyReader(ctx.prompt_tail, self._take)

    @classmethod
    def structural_tag(
        cls,
        tools: Sequence[Mapping[str, Any]],
        *,
        names: Sequence[str] | None = None,
        required: bool,
        parallel: bool,  # noqa: ARG003
    ) -> Mapping[str, Any] | None:
        """A call ends the turn, so that there is one at most; it is behind its arguments that the model writes its end token."""
        heads = (
            "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
            " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>",
        )
        call = structural.one_of(
            *(
                structural.tag(head.format(name), structural.schema(parameters), "")
                for name, parameters in structural.functions(tools, names)
                for head in heads
            )
        )
        return structural.structural_tag(
            _behind_thoughts(call if required else structural.one_of(call, _final(_TEXT)), preambles=not required)
        )

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

    def answer_format(self, answer: Mapping[str, Any], token_ids: Mapping[str, int]) -> Mapping[str, Any]:  # noqa: ARG002 - markers are empty
        return _behind_thoughts(_final(answer), preambles=False)

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

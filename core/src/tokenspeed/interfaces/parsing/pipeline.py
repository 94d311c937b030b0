"""Both parsers of one choice, one behind the other: what a server feeds.

Reasoning goes first, and what it calls content goes to the tool parser, with two rules for where they meet:

* Models write calls inside their reasoning, or forget its end tag before a call. A complete call of a declared tool inside reasoning ends the reasoning
  and is returned; anything less stays reasoning. Reasoning is held back only from where a call is announced until that is decided, at the latest at a
  tag of the reasoning.
* Behind the announcement of a call in the content, reasoning tags are data: arguments may quote them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from tokenspeed.interfaces.parser import ParserContext, ParserDelta, ToolCallDelta, ToolParser
from tokenspeed.interfaces.parsing.json_stream import JsonStream, Progress
from tokenspeed.interfaces.parsing.scanner import Markers, Scanner
from tokenspeed.interfaces.parsing.schema import ToolSchemas
from tokenspeed.interfaces.reasoning import ReasoningContext, ReasoningDelta, ReasoningParser

__all__ = ["ChoiceParser"]

Spans = Sequence[tuple[int, int]]

#: A call is followed in such pieces, so that where it ends or breaks does not depend on how the text was cut: neither happens inside a plain run.
_PIECES = re.compile(r"[\w ./,:;-]+|[\s\S]")


class ChoiceParser:
    """Feeds one choice through a reasoning parser and a tool parser.

    Args:
        reasoning: class (or factory) of the reasoning parser, or ``None``: reasoning is not looked for.
        tools: class (or factory) of the tool parser, or ``None``: calls are not looked for, and their text is content.
        ctx: what both are built from.
    """

    def __init__(
        self,
        reasoning: Callable[[ReasoningContext], ReasoningParser] | None,
        tools: Callable[[ParserContext], ToolParser] | None,
        ctx: ParserContext,
    ) -> None:
        self._factory = tools
        self._ctx = ctx
        self._out = _Collector(ctx.history_calls)
        self._tools = tools(ctx) if tools else None
        self._shows_reasoning = reasoning is not None
        self._reasoning: ReasoningParser | None = None
        if reasoning is not None and not (self._tools is not None and self._tools.reads_reasoning):
            self._reasoning = reasoning(ReasoningContext(prompt_tail=ctx.prompt_tail))
        self._declared = ToolSchemas(ctx.tools)
        self._announcements: Markers | None = None
        if self._reasoning is not None and self._tools is not None and self._tools.announcements:
            self._announcements = Markers(self._tools.announcements)
        self._tags = (
            Markers(self._reasoning.markers) if self._reasoning is not None and self._reasoning.markers else None
        )
        self._scan = Scanner()
        self._attempt: _Attempt | None = None
        self._in_calls = False  # a call was announced in the content
        self._exact = False  # tokens tell which tags are real, text is none

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must keep special tokens."""
        return any(parser.needs_special_tokens for parser in (self._reasoning, self._tools) if parser is not None)

    @property
    def reasoning_parser(self) -> ReasoningParser | None:
        """The reasoning parser in use: for its ``markers`` if they are ``single_tokens``, and whether it is ``inside``."""
        return self._reasoning

    def feed(self, text: str, marker_spans: Spans | None = None) -> ParserDelta:
        """Take the next piece of generated text; ``marker_spans`` as in ``ReasoningParser.feed``."""
        self._exact = marker_spans is not None and self._reasoning is not None and self._reasoning.single_tokens
        done = 0
        if marker_spans is not None and self._reasoning is not None and self._exact:
            for begin, end in marker_spans:
                self._scan.append(text[done:begin])
                self._run()
                self._end_stretch()
                self._route(self._reasoning.feed(text[begin:end], [(0, end - begin)]))
                done = end
        self._scan.append(text[done:])
        self._run()
        return self._out.take(self._shows_reasoning)

    def finish(self) -> ParserDelta:
        """The text is at its end: flush both parsers."""
        self._scan.closed = True
        self._run()
        self._end_stretch()
        if self._reasoning is not None:
            self._route(self._reasoning.finish())
        if self._tools is not None:
            self._out.tell(self._tools.finish())
        return self._out.take(self._shows_reasoning)

    # -- routing

    def _run(self) -> None:
        while self._follow() if self._attempt is not None else self._pass():
            pass

    def _pass(self) -> bool:
        """Text outside attempts, up to the next announcement of a call."""
        if self._announcements is None or self._in_calls or self._reasoning is None:
            text, self._scan.pos = self._scan.text[self._scan.pos :], len(self._scan.text)
            self._plain(text)
            return False
        text, marker = self._scan.until(self._announcements)
        self._plain(text)
        if not marker:
            return False
        if self._reasoning.inside and self._ctx.constrained:  # a grammar holds what comes behind the reasoning
            self._plain(marker)
            return True
        if self._reasoning.inside:
            self._attempt = _Attempt(self._new_tools(), self._declared)
            self._scan.pos -= len(marker)
            return True
        if not self._exact:
            self._in_calls = True
            self._route(self._reasoning.end_reasoning())
        self._plain(marker)
        return True

    def _plain(self, text: str) -> None:
        if not text:
            return
        if self._reasoning is None or self._in_calls:
            self._content(text)
        else:
            self._route(self._reasoning.feed(text, [] if self._exact else None))

    def _follow(self) -> bool:
        """Text of a call inside reasoning, until it is decided."""
        attempt, scan = self._attempt, self._scan
        assert attempt is not None
        if self._exact or self._tags is None:
            text, tag = scan.text[scan.pos :], ""
            scan.pos = len(scan.text)
        else:
            text, tag = scan.until(self._tags)
        end = scan.pos
        for piece in _PIECES.finditer(text):
            if attempt.feed(piece.group()) is not Progress.OPEN:
                scan.pos = end - len(tag) - (len(text) - piece.end())
                self._decide()
                return True
        if tag:
            self._decide()
            self._plain(tag)
        return bool(tag)

    def _decide(self) -> None:
        """The attempt is over: the call is returned, or its text stays reasoning."""
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        assert self._reasoning is not None
        if attempt.progress is not Progress.DONE:
            self._plain("".join(attempt.raw))
            return
        self._route(self._reasoning.end_reasoning())
        assert self._tools is not None
        self._out.tell(self._tools.finish())
        self._tools = attempt.tools
        self._out.renumber()
        for delta in attempt.deltas:
            self._out.tell(delta)

    def _end_stretch(self) -> None:
        """A tag or the end of the text: an attempt fails, and the beginning of an announcement is none."""
        if self._attempt is not None:
            self._decide()
            return
        text, self._scan.pos = self._scan.text[self._scan.pos :], len(self._scan.text)
        self._plain(text)

    def _route(self, delta: ReasoningDelta) -> None:
        for inside, text in delta.segments:
            if inside:
                self._out.reasoning.append(text)
            else:
                self._content(text)

    def _content(self, text: str) -> None:
        if not text:
            return
        if self._tools is None:
            self._out.content.append(text)
        else:
            self._out.tell(self._tools.feed(text))

    def _new_tools(self) -> ToolParser:
        assert self._factory is not None
        return self._factory(replace(self._ctx, history_calls=self._out.history))


class _Attempt:
    """Follows a call that was announced inside reasoning.

    Attributes:
        progress: ``DONE`` once one call of a declared tool is complete, ``FAILED`` when that cannot come any more.
        raw: the text so far.
        deltas: what ``tools`` told so far.
    """

    def __init__(self, tools: ToolParser, declared: ToolSchemas) -> None:
        self.progress = Progress.OPEN
        self.raw: list[str] = []
        self.deltas: list[ParserDelta] = []
        self.tools = tools
        self._declared = declared
        self._begun = False
        self._json = JsonStream()

    def feed(self, piece: str) -> Progress:
        """Take the next piece."""
        self.raw.append(piece)
        delta = self.tools.feed(piece)
        if delta.content:
            self.progress = Progress.FAILED
        elif delta.calls:
            self.deltas.append(delta)
            for call in delta.calls:
                self._take(call)
        return self.progress

    def _take(self, call: ToolCallDelta) -> None:
        if call.name is not None:
            if self._begun or call.name not in self._declared:
                self.progress = Progress.FAILED
            self._begun = True
        self._json.feed(call.arguments)
        if self.progress is Progress.OPEN:
            self.progress = self._json.progress


class _Collector:
    """Puts together what one ``feed`` tells, with calls numbered through all tool parsers of the choice."""

    def __init__(self, history: int) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._first_history = history
        self._offset = 0  # calls of the parsers before the present one
        self._count = 0

    @property
    def history(self) -> int:
        """Calls in the conversation so far, those of this choice included."""
        return self._first_history + self._count

    def renumber(self) -> None:
        """Another parser tells from now on; its first call has index 0."""
        self._offset = self._count

    def tell(self, delta: ParserDelta) -> None:
        """Add what a tool parser told."""
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        for call in delta.calls:
            index = call.index + self._offset
            self._count = max(self._count, index + 1)
            self._calls.append(replace(call, index=index) if self._offset else call)

    def take(self, with_reasoning: bool) -> ParserDelta:
        """What was collected since the last call."""
        reasoning = "".join(self.reasoning) if with_reasoning else ""
        delta = ParserDelta(content="".join(self.content), calls=tuple(self._calls), reasoning=reasoning)
        self.content, self.reasoning, self._calls = [], [], []
        return delta

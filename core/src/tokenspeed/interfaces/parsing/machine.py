"""The frame of every tool parser: states that consume from a scanner and write to an output."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable

from tokenspeed.interfaces.parser import ParserContext, ParserDelta, ToolCallDelta, ToolParser
from tokenspeed.interfaces.parsing.scanner import Scanner

__all__ = ["SPACE", "Output", "StateMachine"]

SPACE = re.compile(r"\s*")

#: Line breaks directly before a call belong to its markup; so many characters of trailing white space are held back to tell.
_HELD_SPACE = 2


class Output:
    """Collects what one ``feed`` tells.

    White space around calls is markup: up to two characters before the first one, and all of it behind one.

    Attributes:
        count: calls begun so far.
    """

    __slots__ = ("_calls", "_content", "_drop_space", "_open", "_reasoning", "_space", "count")

    def __init__(self) -> None:
        self.count = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[int, str | None, str | None, list[str]]] = []
        self._open: list[str] | None = None  # arguments of the piece being collected
        self._space = ""
        self._drop_space = False

    def text(self, text: str) -> None:
        """Visible text."""
        if self._drop_space:
            text = text.lstrip()
        if not text:
            return
        self._drop_space = False
        text = self._space + text
        solid = max(len(text.rstrip()), len(text) - _HELD_SPACE)
        self._space = text[solid:]
        self._content.append(text[:solid])

    def reasoning(self, text: str) -> None:
        """Reasoning, from parsers that read it."""
        self._reasoning.append(text)

    def markup(self) -> None:
        """A marker of calls stood here: white space on both sides is not content."""
        self._space = ""
        self._drop_space = True

    def begin(self, name: str, id: str | None = None) -> None:
        """A call begins; ``arguments`` belong to it from now on."""
        self.markup()
        self._open = []
        self._calls.append((self.count, name, id, self._open))
        self.count += 1

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call that began last."""
        if not text:
            return
        if self._open is None:
            self._open = []
            self._calls.append((self.count - 1, None, None, self._open))
        self._open.append(text)

    @property
    def behind_call(self) -> bool:
        """Whether nothing but markup and white space was told since a call."""
        return self.count > 0 and self._drop_space

    def flush(self) -> None:
        """The text is at its end: white space held back is content."""
        self._content.append(self._space)
        self._space = ""

    def take(self) -> ParserDelta:
        """What was collected since the last call."""
        if not (self._content or self._calls or self._reasoning):
            return ParserDelta()
        calls = tuple(
            ToolCallDelta(index=i, name=name, id=id, arguments="".join(args)) for i, name, id, args in self._calls
        )
        delta = ParserDelta(content="".join(self._content), calls=calls, reasoning="".join(self._reasoning))
        self._content, self._calls, self._reasoning, self._open = [], [], [], None
        return delta


class StateMachine(ToolParser):
    """A tool parser whose states are methods.

    A state consumes what it can from ``scan``, writes to ``out``, may set ``state``, and returns whether it wants to be called again: ``False`` means that
    it needs more text (or, once the scanner is closed, that it is through).
    """

    def __init__(self, ctx: ParserContext) -> None:
        super().__init__(ctx)
        self.scan = Scanner()
        self.out = Output()
        self.state: Callable[[], bool] = self.on_text

    @abstractmethod
    def on_text(self) -> bool:
        """The state outside calls."""

    @property
    def outside(self) -> bool:
        """Whether the state is one outside calls, where only what may become markup is held back."""
        return self.state == self.on_text

    def on_end(self) -> None:
        """The text ended in ``state``: tell what is content after all. By default a call that was cut is dropped."""

    def feed(self, text: str) -> ParserDelta:
        self.scan.append(text)
        while self.state():
            pass
        return self.out.take()

    def finish(self) -> ParserDelta:
        # Directly behind a call, what is held back is markup that a limit cut. Formats without markers hold back plain text as well.
        if self.outside and self.out.behind_call and (self.announcements or self.ctx.constrained):
            self.scan.pos = len(self.scan.text)
        self.scan.closed = True
        while self.state():
            pass
        self.on_end()
        self.out.flush()
        return self.out.take()

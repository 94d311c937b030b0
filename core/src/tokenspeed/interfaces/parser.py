"""Contract of a tool-call parser (``ToolParserSpec``, API 1).

A parser is an incremental machine over the text of one choice: ``feed`` takes what was generated since the last call, cut anywhere, and returns what can be
told to the client now; ``finish`` flushes. Any partition of the text gives the same result. A parser never raises on model output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ParserContext", "ParserDelta", "ToolCallDelta", "ToolParser"]


@dataclass(frozen=True, kw_only=True)
class ParserContext:
    """What a parser is built from, once per choice.

    Attributes:
        tools: the request's ``tools`` as plain JSON, in order; empty when there are none.
        prompt_tail: the end of the rendered prompt (at most 4,096 characters), from which an initial state is read.
        token_text: text of special tokens by id for families whose markers are special tokens.
        history_calls: how many tool calls the conversation already holds (families that number their ids).
        constrained: the model is held to ``structural_tag``: its markup is whole, so that only what ends a value there ends one here.
        held: functions whose arguments are then held to the declared parameters, and not only to being an object.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    prompt_tail: str = ""
    token_text: Mapping[int, str] = field(default_factory=dict)
    history_calls: int = 0
    constrained: bool = False
    held: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ToolCallDelta:
    """A piece of one call: the first of an index carries ``name``, whole, and perhaps ``id`` (``None``: the server makes one); ``arguments`` is appended."""

    index: int
    name: str | None = None
    id: str | None = None
    arguments: str = ""


@dataclass(frozen=True, kw_only=True)
class ParserDelta:
    """What one ``feed`` yields: visible text and pieces of calls, in order of appearance within each kind.

    ``reasoning`` is filled only by parsers whose ``reads_reasoning`` is set; whoever shows no reasoning drops it.
    """

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = ""


class ToolParser(ABC):
    """Finds tool calls in generated text."""

    #: Whether the text must keep special tokens (the markers are special tokens of the vocabulary).
    needs_special_tokens: bool = False

    #: Whether one machine reads reasoning and calls of this format (harmony): no reasoning parser stands before it.
    reads_reasoning: bool = False

    #: Markers that announce calls. Formats of bare JSON or Python have none: their calls are not looked for inside reasoning.
    announcements: tuple[str, ...] = ()

    def __init__(self, ctx: ParserContext) -> None:
        self.ctx = ctx

    @classmethod
    def history_id(cls, call_id: str, name: str, index: int) -> str:  # noqa: ARG003 - for families that need them
        """The id under which a call of the history goes into the chat template; the same goes into the tool message that answers it.

        Args:
            call_id: what the client sent; another server may have made it.
            name: the called function.
            index: how many calls of the conversation precede it.
        """
        return call_id

    @classmethod
    def structural_tag(
        cls,
        tools: Sequence[Mapping[str, Any]],  # noqa: ARG003 - for families that can be constrained
        *,
        names: Sequence[str] | None = None,  # noqa: ARG003
        required: bool,  # noqa: ARG003
        parallel: bool,  # noqa: ARG003
    ) -> Mapping[str, Any] | None:
        """A structural tag that holds the model to calls of this format: whatever text it accepts, this parser reads as calls that fit ``tools``.

        Args:
            tools: the request's ``tools``; the ``parameters`` of each are what its arguments are held to, none means no arguments.
            names: the functions that may be called; ``None`` is all of them.
            required: the text is calls, at least one, and nothing else; otherwise text may stand around them, and there may be none.
            parallel: whether there may be more than one call.

        Returns:
            ``{"type": "structural_tag", "format": ..}``; ``None`` where the format cannot be constrained.

        Raises:
            GrammarError: a tool's names cannot be written in this format.
        """
        return None

    @abstractmethod
    def feed(self, text: str) -> ParserDelta:
        """Take the next piece of generated text."""

    @abstractmethod
    def finish(self) -> ParserDelta:
        """The text is at its end (also when cut by a limit): flush what was held back. Unfinished calls never appear as complete JSON.

        That is how a finished call is told from one that was cut or malformed: its ``arguments``, put together, are a JSON object.
        """

"""From the text of one choice to what its client sees: content, reasoning and tool calls, streamed or whole."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from tokenspeed.interfaces.parser import ParserContext, ParserDelta, ToolCallDelta
from tokenspeed.interfaces.parsing import ChoiceParser, is_complete
from tokenspeed.serving.constraint import HeldCalls

__all__ = ["ChoiceText", "Told", "contained", "parser_context"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def contained(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """The result of a parser's code, which may raise anything: what would end the server (``SystemExit``, ``KeyboardInterrupt``) fails its request alone.

    Such code awaits nothing and signals have handlers of their own, so neither a cancellation nor an interrupt can come from elsewhere.

    Raises:
        RuntimeError: it raised what is no ``Exception``.
    """
    try:
        return call(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"a parser raised {type(error).__name__}: {error}") from error


def _check(delta: ParserDelta) -> None:
    """Raises ``TypeError`` for what would go wrong later, or out to a client: a parser's answer is a plugin's."""
    if not isinstance(delta, ParserDelta):
        raise TypeError(f"a parser gave {type(delta).__name__}, no ParserDelta")
    for field in ("content", "reasoning"):
        _check_type(field, getattr(delta, field), str)
    for call in delta.calls:
        _check_type("calls", call, ToolCallDelta)
        _check_type("index", call.index, int)
        _check_type("arguments", call.arguments, str)
        for field in ("name", "id"):
            if getattr(call, field) is not None:
                _check_type(field, getattr(call, field), str)


def _check_type(field: str, value: object, kind: type) -> None:
    if type(value) is bool or not isinstance(value, kind):
        raise TypeError(f"a parser gave {type(value).__name__} for {field}, which is {kind.__name__}")


class Told(NamedTuple):
    """What a piece of text amounts to; ``calls`` are ``tool_calls`` deltas of the OpenAI form."""

    content: str
    reasoning: str = ""
    calls: Sequence[dict[str, Any]] = ()


class ChoiceText:
    """Sends the text of one choice through its parsers and keeps what a whole answer needs.

    Args:
        parser: the choice's parsers, or ``None``: all text is content.
        parallel: whether more than one call may be told; later ones are dropped whole.
        calls_only: a grammar lets nothing but calls through: what is held back at the end is a piece of their markup.
    """

    def __init__(self, parser: ChoiceParser | None, *, parallel: bool = True, calls_only: bool = False) -> None:
        self._parser = parser
        self._parallel = parallel
        self._calls_only = calls_only
        self._heads: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []
        self._reasoning: list[str] = []

    @property
    def needs_special_tokens(self) -> bool:
        """The text must keep special tokens: some are markers."""
        return self._parser is not None and self._parser.needs_special_tokens

    @property
    def called(self) -> bool:
        """At least one call was told to its end: one that was cut or malformed is none that a client could make."""
        return any(is_complete("".join(arguments)) for arguments in self._arguments)

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "".join(self._reasoning)

    def feed(self, text: str, *, spans: Sequence[tuple[int, int]] | None = None, last: bool = False) -> Told:
        """What ``text`` completes; ``last`` also flushes what the parsers hold.

        ``spans`` are the places in it of reasoning markers that came as tokens, given always or never.
        """
        if self._parser is None:
            return Told(text)
        told = self._take(contained(self._parser.feed, text, spans)) if text else Told("")
        if not last:
            return told
        rest = self._take(contained(self._parser.finish))
        content = told.content if self._calls_only else told.content + rest.content
        return Told(content, told.reasoning + rest.reasoning, [*told.calls, *rest.calls])

    def _take(self, delta: ParserDelta) -> Told:
        _check(delta)
        calls = []
        for call in delta.calls:
            if call.index > 0 and not self._parallel:
                continue
            begun = len(self._heads)
            in_turn = call.index == begun if call.name is not None else 0 <= call.index < begun
            if not in_turn:
                raise ValueError(f"a parser told of call {call.index} out of turn: it has begun {begun}")
            shown: dict[str, Any] = {"index": call.index}
            if call.name is not None:
                head = {"id": call.id or f"call_{uuid.uuid4().hex[:24]}", "type": "function", "name": call.name}
                self._heads.append(head)
                self._arguments.append([call.arguments])
                function = {"name": call.name, "arguments": call.arguments}
                calls.append({**shown, "id": head["id"], "type": "function", "function": function})
            else:
                self._arguments[call.index].append(call.arguments)
                calls.append({**shown, "function": {"arguments": call.arguments}})
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        return Told(delta.content, delta.reasoning, calls)

    def message_calls(self) -> list[dict[str, Any]]:
        """All calls for a whole message."""
        return [
            {"id": head["id"], "type": "function", "function": {"name": head["name"], "arguments": "".join(arguments)}}
            for head, arguments in zip(self._heads, self._arguments, strict=True)
        ]


def parser_context(
    tools: Sequence[Mapping[str, Any]],
    prompt: str,
    token_text: Mapping[int, str],
    messages: Sequence[Mapping[str, Any]],
    *,
    held: HeldCalls | None = None,
) -> ParserContext:
    """What the parsers of one choice are built from; ``held`` says that calls are constrained, and how."""
    calls = sum(len(message.get("tool_calls", ())) for message in messages)
    return ParserContext(
        tools=tools,
        prompt_tail=prompt[-4096:],
        token_text=token_text,
        history_calls=calls,
        constrained=held is not None,
        held=frozenset() if held is None else held.functions,
    )

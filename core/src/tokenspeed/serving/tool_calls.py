"""From parser deltas to the tool calls of an answer, streamed or whole."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parser import ParserContext, ParserDelta, ToolParser

__all__ = ["ToolCalls", "history_calls"]


class ToolCalls:
    """Splits the text of one choice into content and calls.

    Args:
        parser: the family's parser, or ``None``: all text is content.
        parallel: whether more than one call may be told; later ones are dropped whole.
    """

    def __init__(self, parser: ToolParser | None, *, parallel: bool = True) -> None:
        self._parser = parser
        self._parallel = parallel
        self._arguments: list[list[str]] = []
        self._heads: list[dict[str, Any]] = []

    @property
    def any(self) -> bool:
        """At least one call was told."""
        return bool(self._heads)

    def feed(self, text: str, *, last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Content and ``tool_calls`` deltas that ``text`` completes; ``last`` also flushes what the parser holds."""
        if self._parser is None:
            return text, []
        content, calls = self._split(self._parser.feed(text)) if text else ("", [])
        if last:
            rest, more = self._split(self._parser.finish())
            return content + rest, calls + more
        return content, calls

    def _split(self, delta: ParserDelta) -> tuple[str, list[dict[str, Any]]]:
        told = []
        for call in delta.calls:
            if call.index > 0 and not self._parallel:
                continue
            if call.name is not None:
                head = {"id": call.id or f"call_{uuid.uuid4().hex[:24]}", "type": "function", "name": call.name}
                self._heads.append(head)
                self._arguments.append([call.arguments])
                told.append(
                    {
                        "index": call.index,
                        "id": head["id"],
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                )
            else:
                self._arguments[call.index].append(call.arguments)
                told.append({"index": call.index, "function": {"arguments": call.arguments}})
        return delta.content, told

    def message_calls(self) -> list[dict[str, Any]]:
        """All calls for a whole message."""
        return [
            {"id": head["id"], "type": "function", "function": {"name": head["name"], "arguments": "".join(arguments)}}
            for head, arguments in zip(self._heads, self._arguments, strict=True)
        ]


def history_calls(messages: Sequence[Mapping[str, Any]]) -> int:
    """Calls that a conversation already holds."""
    return sum(len(message.get("tool_calls", ())) for message in messages)


def parser_context(
    tools: Sequence[Mapping[str, Any]],
    prompt: str,
    token_text: Mapping[int, str],
    messages: Sequence[Mapping[str, Any]],
) -> ParserContext:
    """What a parser of one choice is built from."""
    return ParserContext(
        tools=tools, prompt_tail=prompt[-4096:], token_text=token_text, history_calls=history_calls(messages)
    )

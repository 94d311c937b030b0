"""Ids of past tool calls in the form that the model's template wants."""

from __future__ import annotations

from typing import Any

from tokenspeed.interfaces.parser import ToolParser

__all__ = ["rewrite_ids"]


def rewrite_ids(messages: list[dict[str, Any]], parser: type[ToolParser]) -> list[dict[str, Any]]:
    """The conversation with each call's id, and the same one in the message that answers it, as the model's family writes it.

    An id counts for the turn that it stands in, since clients use the same ones again in every turn. A result without an id answers the first call of the
    turn that has no result yet.
    """
    index = 0
    renamed: dict[str, str] = {}  # ids of the last turn that called, as given -> as shown
    unanswered: list[str] = []
    shown = []
    for message in messages:
        if calls := message.get("tool_calls"):
            renamed, unanswered = {}, []
            rewritten = []
            for call in calls:
                given = call.get("id", "")
                new = parser.history_id(given, call["function"]["name"], index)
                index += 1
                renamed[given] = new
                unanswered.append(new)
                rewritten.append({**call, "id": new} if new else call)
            message = {**message, "tool_calls": rewritten}
        elif message["role"] == "tool":
            answered = message.get("tool_call_id")
            own = renamed.get(answered, answered) if answered is not None else next(iter(unanswered), "")
            if own in unanswered:
                unanswered.remove(own)
            if own:
                message = {**message, "tool_call_id": own}
        shown.append(message)
    return shown

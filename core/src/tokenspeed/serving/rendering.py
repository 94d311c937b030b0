"""One way to ask any renderer for a prompt: what it cannot write is the request's fault and never the server's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.errors import RequestError
from tokenspeed.interfaces.renderer import Renderer

__all__ = ["UNREAD_TOOLS", "rendered"]

#: What is wrong where ``Renderer.reads_tools`` is false and there are tools. Calls can be forced all the same, but the model learns of no tool.
UNREAD_TOOLS = (
    "the chat template does not read tools: the model is not told which functions there are; "
    "give a template that does with --chat-template, or describe them in a system message"
)


def rendered(
    renderer: Renderer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """``Renderer.render``, with whatever else than ``RequestError`` it raises as one.

    A renderer walks through tools' schemas that nobody has checked, and a template is a program of the model's author.

    Raises:
        RequestError: the conversation or the tools cannot be written in the model's form.
    """
    try:
        return renderer.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=extra,
        )
    except RequestError:
        raise
    except Exception as error:
        what = "these messages and tools" if tools else "these messages"
        raise RequestError(
            f"the model's renderer cannot write {what}: {type(error).__name__}: {error}",
            param="tools" if tools else "messages",
        ) from error

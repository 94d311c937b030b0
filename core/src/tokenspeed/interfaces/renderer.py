"""Contract of a renderer (``RendererSpec``, API 1): it writes a conversation as the prompt text that a model was trained on.

Most models bring a chat template, which is the default renderer. A few families publish code instead, and have a renderer of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.errors import RequestError

__all__ = ["Renderer", "RendererContext", "answered_calls", "refuse_unknown"]


@dataclass(frozen=True, kw_only=True)
class RendererContext:
    """What a renderer is built from, once per process.

    Attributes:
        special_tokens: text by name, for example ``bos_token``.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)


class Renderer(ABC):
    """Messages and tools to prompt text. One object serves all requests, from several threads at once."""

    #: Names of ``chat_template_kwargs`` that mean something; others are refused. ``None``: any, as templates read what they like.
    kwargs: frozenset[str] | None = None

    #: Whether tools appear in the prompt; a template may not know of them.
    reads_tools: bool = True

    def knows(self, name: str) -> bool:
        """Whether a keyword argument of this name changes the prompt, as far as can be told."""
        return self.kwargs is None or name in self.kwargs

    @abstractmethod
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: role (``system``, ``user``, ``assistant``, ``tool``), text in ``content``, and where given ``name``, ``tool_call_id``,
                ``reasoning_content`` and ``tool_calls``, whose arguments are objects (or a text where they are no JSON).
            tools: the request's ``tools`` as plain JSON.
            add_generation_prompt: end with what makes the model answer.
            continue_final_message: end inside the last message, which is the assistant's.
            extra: the request's ``chat_template_kwargs``.

        Raises:
            RequestError: the conversation cannot be written in this form.
        """


def refuse_unknown(known: frozenset[str], extra: Mapping[str, Any]) -> None:
    """Raises ``RequestError`` naming a keyword argument that a renderer does not know."""
    for name in extra:
        if name not in known:
            raise RequestError(
                f"chat_template_kwargs: {name} means nothing to this model; it knows {', '.join(sorted(known)) or 'none'}",
                param="chat_template_kwargs",
            )


def answered_calls(messages: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Which call each tool message answers, by the message's index.

    By ``tool_call_id`` among the calls of the assistant message before it; where that names none, the calls are taken in order.

    Raises:
        RequestError: a tool message has no call left to answer.
    """
    answered: dict[int, Mapping[str, Any]] = {}
    open_calls: list[Mapping[str, Any]] = []
    for at, message in enumerate(messages):
        if message["role"] != "tool":
            open_calls = list(message.get("tool_calls") or ())
            continue
        if not open_calls:
            raise RequestError(
                f"messages[{at}]: a tool message must follow the assistant message whose call it answers",
                param=f"messages[{at}].tool_call_id",
            )
        wanted = message.get("tool_call_id")
        place = next((i for i, call in enumerate(open_calls) if wanted is not None and call.get("id") == wanted), 0)
        answered[at] = open_calls.pop(place)
    return answered

"""Conversations of ``tokenspeed.LLM``: checked and converted as the server does it, rendered, and made token ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenspeed.engine.choices import choose_parser
from tokenspeed.errors import PluginError, RequestError
from tokenspeed.llm_inputs import text_ids
from tokenspeed.plugins.selection import load_target
from tokenspeed.serving.protocol.chat import parse_chat, turns_of
from tokenspeed.serving.protocol.sampling import Limits
from tokenspeed.serving.rendering import UNREAD_TOOLS, rendered
from tokenspeed.serving.tokenizer import NoTokenizer, Tokenizer

if TYPE_CHECKING:
    from tokenspeed.engine.assembly import Assembly
    from tokenspeed.interfaces.parser import ToolParser

__all__ = ["ChatPrompts"]

_log = logging.getLogger(__name__)


class ChatPrompts:
    """Prompts of conversations with one model."""

    def __init__(self, assembly: Assembly, tokenizer: Tokenizer) -> None:
        self._assembly = assembly
        self._tokenizer = tokenizer
        self._warned = False

    def ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], limits: Limits
    ) -> list[int]:
        """Token ids of a conversation up to where the model's answer begins. The log tells once of a template that does not read tools.

        Raises:
            RequestError: a message or a tool is malformed, the model has no chat template, or it cannot render these messages.
        """
        request = parse_chat({"messages": messages, "tools": tools})
        called = any(message.get("tool_calls") or message.get("role") == "tool" for message in request.messages)
        turns, listed = turns_of(request, limits, self._parser if called else None)
        if isinstance(self._tokenizer, NoTokenizer):
            raise RequestError("this LLM has no tokenizer (skip_tokenizer_init): call generate with token ids")
        template = self._tokenizer.template_for(bool(listed))
        if template is None:
            raise RequestError(
                "this model has no chat template; use generate, or pass chat_template", code="no_chat_template"
            )
        if listed and not template.reads_tools and not self._warned:
            self._warned = True
            _log.warning("%s", UNREAD_TOOLS)
        text = rendered(template, turns, tools=listed or None)
        ids = text_ids(text, self._tokenizer, param="messages", add_special_tokens=False)
        if not ids:
            raise RequestError("messages: the conversation renders to an empty prompt", param="messages")
        return ids

    @cached_property
    def _parser(self) -> type[ToolParser] | None:
        """The parser that a server would read the model's calls with: offline they stay text, but ids of past ones are written as it says."""
        assembly = self._assembly
        try:
            choice, _ = choose_parser(
                assembly.host,
                assembly.registry.specs("tool_parser"),
                what="tool parser",
                flag_name="--tool-call-parser",
                asked="auto",
                wanted=assembly.model_spec.tool_parser,
                model=assembly.choices["model"],
            )
        except PluginError:  # the model's own cannot run here: ids stay as they are
            return None
        parser: type[ToolParser] | None = None if choice is None else load_target(choice.spec.target)
        return parser

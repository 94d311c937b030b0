"""Chat templates: Jinja2 in a sandbox, with the helpers that templates on model hubs expect.

The environment matches what ``transformers`` gives a template (its rendering is the oracle in tests): block trimming, loop controls, the
``generation`` block, ``tojson`` without HTML escapes, ``raise_exception`` and ``strftime_now``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenspeed.errors import ModelError, RequestError
from tokenspeed.interfaces.renderer import Renderer

__all__ = ["ChatTemplate"]

#: Marks the end of the message to be continued: private-use characters, and a blank that is gone where the template strips contents.
_CUT = "\ue000CUT\ue001 "


class _GenerationBlock(Extension):
    """``{% generation %}``: marks the assistant's own tokens for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate(Renderer):
    """A compiled template and the special tokens it may print.

    Args:
        source: the template text.
        variables: names such as ``bos_token`` with their text.

    Raises:
        ModelError: the template does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(variables)
        try:
            environment = _environment()
            self._read = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
            self.reads_tools = "tools" in self._read
        except jinja2.TemplateError as error:
            raise ModelError(
                f"the model's chat template does not compile: {error}; give a working one with --chat-template"
            ) from error

    def knows(self, name: str) -> bool:
        """Whether the template reads it."""
        return name in self._read

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

        Raises:
            RequestError: the template refuses the conversation, or fails on it.
        """
        shown = [dict(message) for message in messages]
        if continue_final_message:
            shown[-1]["content"] = str(shown[-1].get("content") or "") + _CUT
        try:
            text = self._template.render(
                {**self._variables, **(extra or {})},
                messages=shown,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (
            Exception
        ) as error:  # a template is a program of the model's author: whatever it raises refuses this request only
            raise RequestError(f"the chat template cannot render these messages: {error}", param="messages") from error
        return self._cut(text) if continue_final_message else text

    @staticmethod
    def _cut(text: str) -> str:
        """Ends the prompt right behind the last message's text, the way the template shows it (some strip it)."""
        end = text.rfind(_CUT.rstrip())
        if end < 0:
            raise RequestError(
                "the chat template does not show the final message's content: it cannot be continued",
                param="continue_final_message",
            )
        return text[:end] if text.startswith(_CUT, end) else text[:end].rstrip()

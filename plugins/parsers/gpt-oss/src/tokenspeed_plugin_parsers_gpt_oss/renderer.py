"""Prompts of gpt-oss in the harmony format.

Source of the format: the harmony format's documentation. Three choices where it leaves room:

* A call in the history is written the way the model writes it (channel first, then recipient, compact JSON): the prompt of the next turn then begins
  with what was generated, and its pages are found in the cache.
* Reasoning is kept for calls that no final answer has followed yet, and dropped otherwise.
* Text beside calls is a preamble on the commentary channel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

from tokenspeed.errors import RequestError
from tokenspeed.interfaces.renderer import Renderer, RendererContext, answered_calls, refuse_unknown
from tokenspeed_plugin_parsers_gpt_oss.typescript import typescript

__all__ = ["HarmonyRenderer"]

_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_CUTOFF = "2024-06"
_EFFORTS = ("low", "medium", "high")


class HarmonyRenderer(Renderer):
    """System and developer message first, then the conversation.

    Args:
        today: where the current date comes from; ``chat_template_kwargs`` may say another.
    """

    kwargs = frozenset({"reasoning_effort", "model_identity", "conversation_start_date"})

    def __init__(self, ctx: RendererContext, *, today: Callable[[], date] = date.today) -> None:
        del ctx  # the special tokens are part of the format
        self._today = today

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        given = extra or {}
        refuse_unknown(self.kwargs, given)
        answered = answered_calls(messages)
        first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        instructions = "\n\n".join(message["content"] for message in messages[:first])
        parts = [self._system(given, bool(tools)), _developer(instructions, tools or ())]
        last_final = max(
            (i for i, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls")), default=-1
        )
        for at, message in enumerate(messages[first:], first):
            role = message["role"]
            if role == "system":
                parts.append(_developer(message["content"], ()))
            elif role == "tool":
                name = answered[at]["function"]["name"]
                parts.append(_message(f"functions.{name} to=assistant<|channel|>commentary", message["content"]))
            elif role == "user":
                speaker = f"user:{message['name']}" if message.get("name") else "user"
                parts.append(_message(speaker, message["content"]))
            else:
                parts += _assistant(message, keep_reasoning=at > last_final)
        if continue_final_message:
            parts[-1] = parts[-1].removesuffix("<|end|>")
        elif add_generation_prompt:
            parts.append("<|start|>assistant")
        return "".join(parts)

    def _system(self, given: Mapping[str, Any], with_tools: bool) -> str:
        effort = given.get("reasoning_effort") or "medium"
        if effort not in _EFFORTS:
            raise RequestError(
                f"reasoning_effort: must be one of {', '.join(_EFFORTS)}, got {effort!r:.40}", param="reasoning_effort"
            )
        lines = [
            str(given.get("model_identity") or _IDENTITY),
            f"Knowledge cutoff: {_CUTOFF}",
            f"Current date: {given.get('conversation_start_date') or self._today().isoformat()}",
            "",
            f"Reasoning: {effort}",
            "",
            "# Valid channels: analysis, commentary, final. Channel must be included for every message.",
        ]
        if with_tools:
            lines.append("Calls to these tools must go to the commentary channel: 'functions'.")
        return _message("system", "\n".join(lines))


def _message(header: str, content: str, end: str = "<|end|>") -> str:
    return f"<|start|>{header}<|message|>{content}{end}"


def _developer(instructions: str, tools: Sequence[Mapping[str, Any]]) -> str:
    sections = ["# Instructions", instructions] if instructions else []
    if tools:
        functions = "\n".join(_function(tool["function"]) for tool in tools)
        sections += ["# Tools", f"## functions\n\nnamespace functions {{\n\n{functions}\n}} // namespace functions"]
    return _message("developer", "\n\n".join(sections)) if sections else ""


def _function(function: Mapping[str, Any]) -> str:
    comments = "".join(f"// {line}\n" for line in (function.get("description") or "").splitlines())
    parameters = function.get("parameters")
    takes = f"(_: {typescript(parameters)})" if parameters and parameters.get("properties") else "()"
    return f"{comments}type {function['name']} = {takes} => any;\n"


def _assistant(message: Mapping[str, Any], *, keep_reasoning: bool) -> list[str]:
    calls = message.get("tool_calls") or ()
    parts = []
    if calls and keep_reasoning and message.get("reasoning_content"):
        parts.append(_message("assistant<|channel|>analysis", message["reasoning_content"]))
    if not calls:
        return [_message("assistant<|channel|>final", message["content"])]
    if message["content"]:
        parts.append(_message("assistant<|channel|>commentary", message["content"]))
    for call in calls:
        header = f"assistant<|channel|>commentary to=functions.{call['function']['name']} <|constrain|>json"
        parts.append(_message(header, _arguments(call["function"]["arguments"]), "<|call|>"))
    return parts


def _arguments(arguments: Any) -> str:
    """Compact, as the model writes them; a text that was no JSON is shown as it was written."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))

"""Prompts of DeepSeek V3.2, whose checkpoint brings an encoder in Python and no chat template.

Source of the format: ``encoding/encoding_dsv32.py`` beside the checkpoint. Tools stand in the first system message; calls are DSML elements; the results
of one turn's calls share a block, after which the same turn goes on. Thinking is off unless ``thinking`` (or ``enable_thinking``) is true; with it, the
reasoning of the turn that is under way is shown and that of earlier turns is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.renderer import Renderer, RendererContext, answered_calls, refuse_unknown

__all__ = ["DeepSeekV32Renderer"]

_BEGIN, _END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_OPEN, _CLOSE = "<｜DSML｜", "</｜DSML｜"
_THINK, _ANSWER = "<think>", "</think>"

# The words that the model was trained on.
_TOOLS = f"""## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "{_OPEN}function_calls>" block like the following as part of your reply to the user:
{_OPEN}function_calls>
{_OPEN}invoke name="$FUNCTION_NAME">
{_OPEN}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{_CLOSE}parameter>
...
{_CLOSE}invoke>
{_OPEN}invoke name="$FUNCTION_NAME2">
...
{_CLOSE}invoke>
{_CLOSE}function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. \
The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:
{_OPEN}function_calls>
...
{_CLOSE}function_calls>
<function_results>
...
</function_results>
{_THINK}...thinking about results{_ANSWER}
Here are the functions available in JSONSchema format:
<functions>
%s
</functions>
"""


class DeepSeekV32Renderer(Renderer):
    """Writes a conversation message by message; what opens the next turn follows the message that it answers."""

    kwargs = frozenset({"thinking", "enable_thinking"})

    def __init__(self, ctx: RendererContext) -> None:
        del ctx  # the special tokens are part of the format

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
        thinking = bool(given.get("thinking") or given.get("enable_thinking"))
        last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        answered = answered_calls(messages)
        parts = [_BEGIN]
        if tools and (not messages or messages[0]["role"] != "system"):
            parts.append(_tool_section(tools))
        for at, message in enumerate(messages):
            role, last = message["role"], at == len(messages) - 1
            marker = _THINK if thinking and at >= last_user else _ANSWER
            opens = not last or add_generation_prompt
            if role == "system":
                parts.append(message["content"] + (_tool_section(tools) if tools and at == 0 else ""))
            elif role == "user":
                parts.append(_USER + message["content"] + (_ASSISTANT + marker if opens else ""))
            elif role == "tool":
                begins = messages[at - 1]["role"] != "tool"
                ends = last or messages[at + 1]["role"] != "tool"
                if begins:
                    parts.append(_results(messages, at, answered))
                if ends and opens:
                    parts.append("\n\n" + marker)
            else:
                parts.append(_assistant(message, thinking=thinking and at > last_user))
                if not (last and continue_final_message):
                    parts.append(_END)
        return "".join(parts)


def _assistant(message: Mapping[str, Any], *, thinking: bool) -> str:
    text: str = message.get("reasoning_content", "") + _ANSWER if thinking else ""
    text += message["content"]
    calls = message.get("tool_calls")
    if not calls:
        return text
    invocations = "\n".join(_invocation(call["function"]) for call in calls)
    return f"{text}\n\n{_OPEN}function_calls>\n{invocations}\n{_CLOSE}function_calls>"


def _invocation(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    if not isinstance(arguments, Mapping):  # no JSON object: the model is shown what was written
        arguments = {"arguments": arguments}
    lines = [
        f'{_OPEN}parameter name="{name}" string="true">{value}{_CLOSE}parameter>'
        if isinstance(value, str)
        else f'{_OPEN}parameter name="{name}" string="false">{_json(value)}{_CLOSE}parameter>'
        for name, value in arguments.items()
    ]
    return "\n".join([f'{_OPEN}invoke name="{function["name"]}">', "\n".join(lines), f"{_CLOSE}invoke>"])


def _results(messages: Sequence[Mapping[str, Any]], first: int, answered: Mapping[int, Mapping[str, Any]]) -> str:
    """All results of one turn, in the order of its calls: they carry no id."""
    run = first
    while run < len(messages) and messages[run]["role"] == "tool":
        run += 1
    calls = list(messages[first - 1]["tool_calls"])
    order = {id(call): place for place, call in enumerate(calls)}
    sorted_run = sorted(range(first, run), key=lambda at: order[id(answered[at])])
    results = "".join(f"\n<result>{messages[at]['content']}</result>" for at in sorted_run)
    return f"\n\n<function_results>{results}\n</function_results>"


def _tool_section(tools: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n" + _TOOLS % "\n".join(_json(tool["function"]) for tool in tools)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

"""``POST /v1/chat/completions``: the request, checked, and the conversation as templates want it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenspeed.errors import RequestError
from tokenspeed.interfaces.parser import ToolParser
from tokenspeed.serving.history_ids import rewrite_ids
from tokenspeed.serving.protocol.parse import Refused, parse_object
from tokenspeed.serving.protocol.sampling import REFUSED_SAMPLING, Limits, SamplingFields

__all__ = [
    "REFUSED_CHAT",
    "ChatRequest",
    "FunctionTool",
    "check_template_kwargs",
    "conversation",
    "parse_chat",
    "tools_of",
    "turns_of",
]

_MIN_ENTRIES = 1024
_MAX_TOOLS = 1024
_MAX_TEMPLATE_KWARGS = 1000
_RESERVED_KWARGS = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatRequest(SamplingFields, kw_only=True, frozen=True):
    """The body of a chat completion."""

    messages: list[dict[str, Any]]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    response_format: dict[str, Any] | None = None


REFUSED_CHAT: dict[str, Refused] = {
    **REFUSED_SAMPLING,
    "structural_tag": Refused('it is structured_outputs now: {"structural_tag": ..}'),
    "functions": Refused("use tools", ([],)),
    "function_call": Refused("use tool_choice", ("none",)),
    "modalities": Refused("only text is served", (["text"],)),
    "audio": Refused("only text is served"),
    "prediction": Refused("predicted outputs are not served"),
    "include_reasoning": Refused("reasoning is always part of the answer", (True,)),
    "verbosity": Refused("ask for it in the messages"),
    "web_search_options": Refused("the server fetches nothing"),
    "chat_template": Refused("templates come from the model or the server's --chat-template, never from a request"),
    "documents": Refused("put documents into the messages", ([],)),
    "mm_processor_kwargs": Refused("only text is served"),
    "echo": Refused("ask /v1/completions", (False,)),
}


class Function(msgspec.Struct, kw_only=True, frozen=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, kw_only=True, frozen=True):
    """An entry of ``tools``."""

    type: Literal["function"]
    function: dict[str, Any]


class Message(msgspec.Struct, kw_only=True, frozen=True):
    """An entry of ``messages``."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolCallFunction(msgspec.Struct, kw_only=True, frozen=True):
    """The call within a history message; ``arguments`` as text or, from some clients, as an object."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, kw_only=True, frozen=True):
    """A call that an earlier answer made."""

    function: dict[str, Any]
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


_REFUSED_MESSAGE = {
    "refusal": Refused("refusals are not part of a prompt", ("",)),
    "annotations": Refused("annotations are not part of a prompt", ([],)),
    "audio": Refused("only text is served"),
    "function_call": Refused("use tool_calls"),
}
_REFUSED_PART = {"cache_control": Refused("prefixes are shared automatically")}


class TextPart(msgspec.Struct, kw_only=True, frozen=True):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


def parse_chat(value: Mapping[str, Any]) -> ChatRequest:
    """The checked request; ranges that depend on the model are checked later.

    Raises:
        RequestError: naming the field.
    """
    request = parse_object(value, ChatRequest, REFUSED_CHAT)
    if not request.messages:
        raise RequestError("messages: at least one message is needed", param="messages")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs: needs logprobs to be true", param="top_logprobs")
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise RequestError("max_tokens and max_completion_tokens contradict each other; give one", param="max_tokens")
    if request.continue_final_message:
        if (
            request.add_generation_prompt
            and "add_generation_prompt" in value
            and value["add_generation_prompt"] is not None
        ):
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        if request.messages[-1].get("role") != "assistant":
            raise RequestError(
                "continue_final_message: the last message must be the assistant's", param="continue_final_message"
            )
    check_template_kwargs(request.chat_template_kwargs)
    return request


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises ``RequestError`` for names that a request gives in fields of their own, or not at all, and for too many of them."""
    if len(kwargs) > _MAX_TEMPLATE_KWARGS:
        raise RequestError(
            f"chat_template_kwargs: at most {_MAX_TEMPLATE_KWARGS} entries, got {len(kwargs)}",
            param="chat_template_kwargs",
        )
    for name in _RESERVED_KWARGS:
        if name in kwargs:
            raise RequestError(f"chat_template_kwargs: {name} cannot be given this way", param="chat_template_kwargs")


def tools_of(request: ChatRequest) -> list[dict[str, Any]]:
    """The request's tools, checked, as given: templates print them, so that the order of keys is kept.

    Raises:
        RequestError: naming the entry.
    """
    if len(request.tools) > _MAX_TOOLS:
        raise RequestError(f"tools: at most {_MAX_TOOLS}, got {len(request.tools)}", param="tools")
    first: dict[str, int] = {}
    for at, tool in enumerate(request.tools):
        prefix = f"tools[{at}]."
        function = parse_object(
            parse_object(tool, FunctionTool, {}, prefix).function, Function, {}, f"{prefix}function."
        )
        if first.setdefault(function.name, at) != at:  # no reader of a call could tell whose arguments it has
            param = f"{prefix}function.name"
            raise RequestError(f"{param}: tools[{first[function.name]}] has this name", param=param)
        if not isinstance((function.parameters or {}).get("properties", {}), dict):
            param = f"{prefix}function.parameters"
            raise RequestError(f"{param}: a JSON schema's properties are an object", param=param)
    return request.tools


def turns_of(
    request: ChatRequest, limits: Limits, parser: type[ToolParser] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages and the tools of a request, checked, as a renderer takes them: what the server and ``tokenspeed.LLM`` do with them alike.

    Args:
        parser: of the model's tool calls, whose ids the calls of the past get; ``None`` leaves them as they are.

    Raises:
        RequestError: as ``tools_of`` and ``conversation``.
    """
    tools, messages = tools_of(request), conversation(request, limits)
    return (messages if parser is None else rewrite_ids(messages, parser)), tools


def conversation(request: ChatRequest, limits: Limits) -> list[dict[str, Any]]:
    """The messages as chat templates want them: content is text (never ``None``), arguments of past calls are objects, ``developer`` is ``system``.

    Raises:
        RequestError: naming the message and field; content that is no text is refused and nothing is fetched; more messages, parts and calls than the
            context has tokens are refused before they are looked at.
    """
    most = max(limits.max_model_len, _MIN_ENTRIES)
    entries = len(request.messages) + sum(
        _size(message.get(name)) for message in request.messages[:most] for name in ("content", "tool_calls")
    )
    if entries > most:
        raise RequestError(
            f"messages: {entries} messages, parts and calls cannot fit into a context of {limits.max_model_len} tokens",
            param="messages",
            code="context_length_exceeded",
        )
    return [_message(entry, f"messages[{at}].") for at, entry in enumerate(request.messages)]


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def _message(entry: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    message = parse_object(entry, Message, _REFUSED_MESSAGE, prefix)
    if message.role not in _ROLES:
        raise RequestError(
            f"{prefix}role: must be one of {', '.join(_ROLES)}, got {message.role[:40]!r}", param=f"{prefix}role"
        )
    if message.content is None and message.role not in ("assistant", "tool"):
        raise RequestError(f"{prefix}content: a {message.role} message needs content", param=f"{prefix}content")
    shown: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content, prefix),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            shown[name] = getattr(message, name)
    if message.reasoning is not None:
        shown.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls:
        if message.role != "assistant":
            raise RequestError(f"{prefix}tool_calls: only the assistant calls tools", param=f"{prefix}tool_calls")
        shown["tool_calls"] = [_call(call, f"{prefix}tool_calls[{at}].") for at, call in enumerate(message.tool_calls)]
    return shown


def _text(content: str | Sequence[Mapping[str, Any]] | None, prefix: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type")
        if kind != "text":
            raise RequestError(
                f"{prefix}content[{at}]: this server takes text only, not {str(kind)[:40]!r}",
                param=f"{prefix}content[{at}]",
                code="unsupported_content",
            )
        texts.append(parse_object(part, TextPart, _REFUSED_PART, f"{prefix}content[{at}].").text)
    return "\n".join(texts)


def _call(entry: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    call = parse_object(entry, ToolCall, {}, prefix)
    function = parse_object(call.function, ToolCallFunction, {}, f"{prefix}function.")
    shown: dict[str, Any] = {
        "type": "function",
        "function": {"name": function.name, "arguments": _arguments(function.arguments)},
    }
    return {"id": call.id, **shown} if call.id is not None else shown


def _arguments(arguments: str | dict[str, Any]) -> Any:
    """Templates print objects; arguments that are no JSON (cut by a limit, say) are shown as they were written."""
    if isinstance(arguments, dict):
        return arguments
    try:
        value = msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments

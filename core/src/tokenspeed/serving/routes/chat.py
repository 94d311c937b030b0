"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from litestar import Response, post

from tokenspeed.errors import EngineError, RequestError
from tokenspeed.serving.body import read_json
from tokenspeed.serving.context import HttpRequest, ServerContext, context_of
from tokenspeed.serving.generation import Delta, Generation, GenerationRequest
from tokenspeed.serving.protocol.answers import chat_logprobs, usage
from tokenspeed.serving.protocol.chat import ChatRequest, conversation, parse_chat, tools_of
from tokenspeed.serving.protocol.parse import parse_object
from tokenspeed.serving.protocol.sampling import StreamOptions, check_context, sampling_params, stop_strings
from tokenspeed.serving.sse import DONE, answer, event, stream_answer, to_json
from tokenspeed.serving.tool_calls import ToolCalls, parser_context

__all__ = ["chat_completions"]


@post("/v1/chat/completions", status_code=200)
async def chat_completions(request: HttpRequest) -> Response[Any]:
    """A chat completion, whole or streamed."""
    context = context_of(request)
    context.admit()
    value, size = await read_json(request)
    chat = await _prepare(context, value, size)
    generation = context.submit(chat.request)
    chat.choices = [chat.tool_calls(context) for _ in generation.choices]
    if chat.body.stream:
        return await stream_answer(request, generation, _stream(chat, generation))
    return Response(to_json(await answer(request, generation, _whole(chat, generation))), media_type="application/json")


@dataclass
class _Chat:
    """One request on its way."""

    context: ServerContext
    body: ChatRequest
    options: StreamOptions
    request: GenerationRequest
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    prompt: str
    model: str
    choices: list[ToolCalls]

    def tool_calls(self, context: ServerContext) -> ToolCalls:
        factory = context.parser_factory
        if factory is None or not self.tools or self.body.tool_choice == "none":
            return ToolCalls(None)
        made = factory(parser_context(self.tools, self.prompt, context.llm.tokenizer.special_tokens(), self.messages))
        return ToolCalls(made, parallel=self.body.parallel_tool_calls)

    def finish_reason(self, delta: Delta) -> str:
        """``tool_calls`` where the model ended by itself after a call; a cut or abort keeps its own name."""
        return "tool_calls" if delta.finish == "stop" and self.choices[delta.choice.index].any else delta.finish


async def _prepare(context: ServerContext, value: dict[str, Any], size: int) -> _Chat:
    """Everything that can be refused is refused here, before any header is sent."""
    body = parse_chat(value)
    context.check_model(body.model)
    options = parse_object(body.stream_options or {}, StreamOptions, {}, "stream_options.")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: needs stream to be true", param="stream_options")
    limits = context.limits
    logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = sampling_params(
        body, limits, max_new_tokens=wanted or limits.max_model_len, logprobs=logprobs, logprobs_field="top_logprobs"
    )
    stops = stop_strings(body)
    tools, messages = tools_of(body), conversation(body)
    active = bool(tools) and body.tool_choice != "none"
    if active and context.parser_factory is None:
        raise RequestError(
            "tools: this server was started without a tool-call parser; see --tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )
    tokenizer = context.llm.tokenizer
    template = tokenizer.tool_template if tools and tokenizer.tool_template is not None else tokenizer.chat_template
    if template is None:
        raise RequestError(
            "this model has no chat template; ask /v1/completions, or start the server with --chat-template",
            code="no_chat_template",
        )
    render = partial(
        template.render,
        messages,
        tools=tools or None,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        extra=body.chat_template_kwargs,
    )
    prompt = await context.llm.off_loop(size, render)
    tokens = await context.llm.encode(prompt, add_special_tokens=body.add_special_tokens, param="messages")
    if not tokens:
        raise RequestError("messages: the conversation renders to an empty prompt", param="messages")
    room = check_context(
        len(tokens),
        wanted,
        limits,
        param="max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens",
    )
    request = GenerationRequest(
        prompts=[tokens],
        params=msgspec.structs.replace(params, max_new_tokens=room, min_tokens=min(params.min_tokens, room)),
        n=body.n,
        stop=stops,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens and not (active and context.parser_needs_special_tokens),
        priority=body.priority,
        salt=(body.cache_salt or "").encode(),
        request_id=context.new_id("chatcmpl"),
        streaming=body.stream,
    )
    return _Chat(context, body, options, request, messages, tools, prompt, body.model or context.model_names[0], [])


def _check(delta: Delta) -> None:
    if delta.finish == "error":
        raise EngineError(delta.error or "the request failed in the engine")


async def _whole(chat: _Chat, generation: Generation) -> dict[str, Any]:
    texts: list[list[str]] = [[] for _ in generation.choices]
    entries: list[list[Any]] = [[] for _ in generation.choices]
    ends: dict[int, Delta] = {}
    while (deltas := await generation.next()) is not None:
        for delta in deltas:
            _check(delta)
            at = delta.choice.index
            content, _ = chat.choices[at].feed(delta.text, last=bool(delta.finish))
            texts[at].append(content)
            entries[at].extend(delta.entries or ())
            if delta.finish:
                ends[at] = delta
    if generation.abort_reason:
        return {}
    shown = []
    for at, end in sorted(ends.items()):
        calls = chat.choices[at].message_calls()
        content = "".join(texts[at])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        logprobs = (
            chat_logprobs(chat.context.llm.tokenizer, entries[at], chat.body.top_logprobs or 0)
            if chat.body.logprobs
            else None
        )
        shown.append(
            {
                "index": at,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": chat.finish_reason(end),
                "stop_reason": end.stop_reason,
            }
        )
    return {
        "id": chat.request.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": chat.model,
        "choices": shown,
        "usage": usage(generation.choices, chat.body.n),
    }


async def _stream(chat: _Chat, generation: Generation) -> AsyncGenerator[bytes, None]:
    """Events of one wake-up are joined into one write; the fixed parts of an event are encoded once."""
    head = {
        "id": chat.request.request_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": chat.model,
    }
    opening = b"data: " + to_json(head)[:-1] + b',"choices":[{"index":'
    heads = [opening + b"%d" % at + b',"delta":' for at in range(len(generation.choices))]
    told: set[int] = set()
    continuous = bool(chat.options.continuous_usage_stats)
    include = bool(chat.options.include_usage) or continuous
    tail = b',"usage":null}\n\n' if include else b"}\n\n"
    while (deltas := await generation.next()) is not None:
        out: list[bytes] = []
        for delta in deltas:
            _check(delta)
            at = delta.choice.index
            if continuous:
                tail = b',"usage":' + to_json(usage(generation.choices, chat.body.n, running=True)) + b"}\n\n"
            if at not in told:
                told.add(at)
                out += (heads[at], b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]', tail)
            content, calls = chat.choices[at].feed(delta.text, last=bool(delta.finish))
            if not (content or calls or delta.entries or delta.finish):
                continue
            out += (
                heads[at],
                _delta(content, calls, empty=bool(delta.finish)),
                b',"logprobs":',
                _logprobs(chat, delta),
                b',"finish_reason":',
            )
            if delta.finish:
                out += (to_json(chat.finish_reason(delta)), b',"stop_reason":', to_json(delta.stop_reason), b"}]", tail)
            else:
                out += (b"null}]", tail)
        if out:
            yield b"".join(out)
    if generation.abort_reason:
        return
    last = (
        event({**head, "choices": [], "usage": usage(generation.choices, chat.body.n)})
        if chat.options.include_usage
        else b""
    )
    yield last + DONE


def _delta(content: str, calls: list[dict[str, Any]], *, empty: bool) -> bytes:
    if not calls:
        return b"{}" if empty and not content else b'{"content":' + to_json(content) + b"}"
    return to_json({"content": content, "tool_calls": calls} if content else {"tool_calls": calls})


def _logprobs(chat: _Chat, delta: Delta) -> bytes:
    if delta.entries is None or not delta.entries:
        return b"null"
    return to_json(chat_logprobs(chat.context.llm.tokenizer, delta.entries, chat.body.top_logprobs or 0))

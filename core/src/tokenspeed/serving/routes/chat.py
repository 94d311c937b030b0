"""``POST /v1/chat/completions``: check, render, tokenise, submit."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from litestar import Response, post

from tokenspeed.errors import RequestError
from tokenspeed.interfaces.parsing import ChoiceParser
from tokenspeed.serving.body import read_json
from tokenspeed.serving.chat_template import ChatTemplate
from tokenspeed.serving.choice_text import ChoiceText, parser_context
from tokenspeed.serving.context import HttpRequest, ServerContext, context_of
from tokenspeed.serving.generation import GenerationRequest
from tokenspeed.serving.protocol.chat import ChatRequest, conversation, parse_chat, tools_of
from tokenspeed.serving.protocol.sampling import (
    Limits,
    check_context,
    parse_stream_options,
    sampling_params,
    stop_strings,
)
from tokenspeed.serving.routes.chat_answer import ChatJob, stream_chat, whole_chat
from tokenspeed.serving.sse import answer, stream_answer, to_json

__all__ = ["chat_completions"]


@post("/v1/chat/completions", status_code=200)
async def chat_completions(request: HttpRequest) -> Response[Any]:
    """A chat completion, whole or streamed. Everything that can be refused is refused before any header is sent."""
    context = context_of(request)
    context.admit()
    value, size = await read_json(request)
    job = await _prepare(request, context, value, size)
    generation = context.submit(job.request)
    if job.body.stream:
        return await stream_answer(request, generation, stream_chat(job, generation))
    return Response(
        to_json(await answer(request, generation, whole_chat(job, generation))), media_type="application/json"
    )


async def _prepare(http: HttpRequest, context: ServerContext, value: dict[str, Any], size: int) -> ChatJob:
    body = parse_chat(value)
    context.check_model(body.model)
    options, limits = parse_stream_options(body), context.limits
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = sampling_params(
        body,
        limits,
        max_new_tokens=wanted or limits.max_model_len,
        logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
        logprobs_field="top_logprobs",
    )
    stops, tools, messages = stop_strings(body), tools_of(body), conversation(body, limits)
    active = bool(tools) and body.tool_choice != "none"
    if active and context.tool_parser is None:
        raise RequestError(
            "tools: this server was started without a tool-call parser; see --tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )
    prompt = await context.llm.off_loop(size, partial(_render, _template(context, bool(tools)), body, messages, tools))
    tokens = await _encode(context, body, prompt)
    room = _room(len(tokens), wanted, body, limits)
    texts = [_choice_text(context, body, tools if active else [], messages, prompt) for _ in range(body.n)]
    markers = any(text.needs_special_tokens for text in texts)
    request = GenerationRequest(
        prompts=[tokens],
        params=msgspec.structs.replace(params, max_new_tokens=room, min_tokens=min(params.min_tokens, room)),
        n=body.n,
        stop=stops,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens and not markers,
        priority=body.priority,
        salt=(body.cache_salt or "").encode(),
        request_id=context.new_id("chatcmpl", http),
        streaming=body.stream,
    )
    return ChatJob(context, body, options, request, body.model or context.model_names[0], texts)


def _template(context: ServerContext, with_tools: bool) -> ChatTemplate:
    template = context.llm.tokenizer.template_for(with_tools)
    if template is None:
        raise RequestError(
            "this model has no chat template; ask /v1/completions, or start the server with --chat-template",
            code="no_chat_template",
        )
    return template


def _render(
    template: ChatTemplate, body: ChatRequest, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> str:
    return template.render(
        messages,
        tools=tools or None,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        extra=body.chat_template_kwargs,
    )


async def _encode(context: ServerContext, body: ChatRequest, prompt: str) -> list[int]:
    tokens = await context.llm.encode(prompt, add_special_tokens=body.add_special_tokens, param="messages")
    if not tokens:
        raise RequestError("messages: the conversation renders to an empty prompt", param="messages")
    return tokens


def _room(prompt_tokens: int, wanted: int | None, body: ChatRequest, limits: Limits) -> int:
    field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    return check_context(prompt_tokens, wanted, limits, param=field, prompt_param="messages")


def _choice_text(
    context: ServerContext, body: ChatRequest, tools: list[dict[str, Any]], messages: list[dict[str, Any]], prompt: str
) -> ChoiceText:
    """The parsers of one choice. A parser that reads reasoning is needed with and without tools."""
    parser = context.tool_parser
    use_tools = parser is not None and (tools or parser.reads_reasoning)
    if not use_tools and context.reasoning_parser is None:
        return ChoiceText(None)
    about = parser_context(tools, prompt, context.llm.tokenizer.special_tokens, messages)
    made = ChoiceParser(context.reasoning_parser, parser if use_tools else None, about)
    return ChoiceText(made, parallel=body.parallel_tool_calls)

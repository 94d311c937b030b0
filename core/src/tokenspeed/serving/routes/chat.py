"""``POST /v1/chat/completions``: check, render, tokenise, submit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from litestar import Response, post

from tokenspeed.errors import RequestError
from tokenspeed.interfaces.parser import ParserContext, ToolParser
from tokenspeed.interfaces.parsing import ChoiceParser
from tokenspeed.interfaces.reasoning import ReasoningContext, ReasoningParser
from tokenspeed.interfaces.renderer import Renderer
from tokenspeed.messages import Grammar
from tokenspeed.serving.body import read_json
from tokenspeed.serving.choice_text import ChoiceText, contained, parser_context
from tokenspeed.serving.constraint import Constraint, HeldCalls, chat_grammar, check_fields
from tokenspeed.serving.context import HttpRequest, ServerContext, context_of
from tokenspeed.serving.generation import GenerationRequest
from tokenspeed.serving.protocol.chat import ChatRequest, parse_chat, turns_of
from tokenspeed.serving.protocol.sampling import (
    Limits,
    check_context,
    parse_stream_options,
    sampling_params,
    stop_strings,
)
from tokenspeed.serving.protocol.structured import answer_of
from tokenspeed.serving.protocol.tool_choice import tool_choice_of
from tokenspeed.serving.rendering import rendered
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
    context.check_text()
    options, limits = parse_stream_options(body), context.limits
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = sampling_params(
        body,
        limits,
        max_new_tokens=wanted or limits.max_model_len,
        logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
        logprobs_field="top_logprobs",
    )
    session = context.session_of(http, body.session_id, body.retain_s, salt=body.cache_salt, choices=body.n)
    parser, stops = context.tool_parser, stop_strings(body)
    messages, tools = turns_of(body, limits, parser)
    choice = tool_choice_of(body.tool_choice, [tool["function"]["name"] for tool in tools])
    if choice.active and parser is None:
        raise RequestError(
            "tools: this server was started without a tool-call parser; see --tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )
    held = Constraint(
        answer=answer_of(body.response_format, body.structured_outputs),
        choice=choice,
        tools=tools,
        parallel=body.parallel_tool_calls and not choice.named,
        parser=parser,
    )
    if held.ends_text:
        check_fields(body, held.param)
    if held.param and (body.continue_final_message or not body.add_generation_prompt):
        _check_begin(context, body, held.param)
    prompt = await context.llm.off_loop(size, partial(_render, _template(context, bool(tools)), body, messages, tools))
    tokens = await _encode(context, body, prompt)
    room = _room(len(tokens), wanted, body, limits)
    markers = _markers(context)
    grammar, calls = None, None
    if held.param:
        grammar, calls = await context.llm.checked(partial(_grammar, context, held, prompt, markers))
    about = parser_context(
        tools if choice.active else [], prompt, context.llm.tokenizer.special_tokens, messages, held=calls
    )
    texts = [
        _choice_text(context, about, body, parser if choice.active else None, choice.required) for _ in range(body.n)
    ]
    special = any(text.needs_special_tokens for text in texts) or _special_markers(context, held)
    request = GenerationRequest(
        prompts=[tokens],
        params=msgspec.structs.replace(params, max_new_tokens=room, min_tokens=min(params.min_tokens, room)),
        n=body.n,
        stop=stops,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens and not special,
        hide_stop_token=special,
        grammar=grammar,
        grammar_param=held.param,
        markers={token: text for text, token in markers.items()},
        priority=body.priority,
        salt=(body.cache_salt or "").encode(),
        request_id=context.new_id("chatcmpl", http),
        streaming=body.stream,
        session=session,
    )
    model = body.model or context.model_names[0]
    return ChatJob(context, body, options, request, model, texts, choice.named, looks_for_calls=choice.active)


def _check_begin(context: ServerContext, body: ChatRequest, param: str) -> None:
    """Raises ``RequestError`` where the reply's grammar would begin with a header that this prompt has behind it, or has not come to.

    In a format whose header of each message says what it is, the grammar holds what follows the assistant's role at the end of the prompt.
    """
    tools, reasoning = context.tool_parser, context.reasoning_parser
    writes_headers = (
        reasoning is not None and not reasoning.markers and reasoning.answer_format is not ReasoningParser.answer_format
    )
    if writes_headers or (tools is not None and tools.reads_reasoning):
        field = "continue_final_message" if body.continue_final_message else "add_generation_prompt"
        raise RequestError(
            f"{field}: {param} holds this model's reply from its first header on, which this prompt does not lead to; leave one of the two out",
            param=field,
            code="unsupported_parameter",
        )


def _template(context: ServerContext, with_tools: bool) -> Renderer:
    template = context.llm.tokenizer.template_for(with_tools)
    if template is None:
        raise RequestError(
            "this model has no chat template; ask /v1/completions, or start the server with --chat-template",
            code="no_chat_template",
        )
    return template


def _render(template: Renderer, body: ChatRequest, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    return rendered(
        template,
        messages,
        tools=tools or None,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        extra=_template_kwargs(template, body),
    )


def _template_kwargs(template: Renderer, body: ChatRequest) -> dict[str, Any]:
    """``chat_template_kwargs``, and ``reasoning_effort`` where the model's prompt depends on it."""
    effort, given = body.reasoning_effort, body.chat_template_kwargs
    if effort is None:
        return given
    if not template.knows("reasoning_effort"):
        raise RequestError(
            "reasoning_effort: this model's chat template does not read it; leave it out",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    if "reasoning_effort" in given:
        raise RequestError(
            "reasoning_effort: it is in chat_template_kwargs too; give it once", param="reasoning_effort"
        )
    return {**given, "reasoning_effort": effort}


async def _encode(context: ServerContext, body: ChatRequest, prompt: str) -> list[int]:
    tokens = await context.llm.encode(prompt, add_special_tokens=body.add_special_tokens, param="messages")
    if not tokens:
        raise RequestError("messages: the conversation renders to an empty prompt", param="messages")
    return tokens


def _room(prompt_tokens: int, wanted: int | None, body: ChatRequest, limits: Limits) -> int:
    field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    return check_context(prompt_tokens, wanted, limits, param=field, prompt_param="messages")


def _markers(context: ServerContext) -> dict[str, int]:
    """Ids of the reasoning's markers by their text, if each is one token of the vocabulary and the parser can be told of them."""
    parser = context.reasoning_parser
    if parser is None or not parser.single_tokens:
        return {}
    ids = {text: context.llm.tokenizer.token_id(text) for text in parser.markers}
    return {text: token for text, token in ids.items() if token is not None} if None not in ids.values() else {}


def _special_markers(context: ServerContext, held: Constraint) -> bool:
    """Whether a marker that the parsers look for is a special token of this model, though it need not be in its family."""
    parsers = (context.reasoning_parser, context.tool_parser if held.choice.active else None)
    texts = [text for parser in parsers if parser is not None for text in _looked_for(parser)]
    ids = (context.llm.tokenizer.token_id(text) for text in texts)
    return any(token in context.llm.tokenizer.special_tokens for token in ids if token is not None)


def _looked_for(parser: type[ReasoningParser] | type[ToolParser]) -> tuple[str, ...]:
    return parser.markers if issubclass(parser, ReasoningParser) else parser.announcements


def _grammar(
    context: ServerContext, held: Constraint, prompt: str, markers: Mapping[str, int]
) -> tuple[Grammar | None, HeldCalls | None]:
    parser = context.reasoning_parser
    reasoning = None if parser is None else contained(parser, ReasoningContext(prompt_tail=prompt[-4096:]))
    return chat_grammar(held, context.grammar_checker, reasoning, markers)


def _choice_text(
    context: ServerContext, about: ParserContext, body: ChatRequest, parser: type[ToolParser] | None, forced: bool
) -> ChoiceText:
    """The parsers of one choice. Where no calls are looked for, a parser that reads both leaves the reasoning to the family's other one."""
    if parser is None and context.reasoning_parser is None:
        return ChoiceText(None)
    made = contained(ChoiceParser, context.reasoning_parser, parser, about)
    return ChoiceText(made, parallel=body.parallel_tool_calls, calls_only=forced and parser is not None)

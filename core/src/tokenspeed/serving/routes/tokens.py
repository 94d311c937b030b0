"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from litestar import post

from tokenspeed.errors import RequestError
from tokenspeed.serving.body import read_json
from tokenspeed.serving.context import HttpRequest, context_of
from tokenspeed.serving.protocol.chat import ChatRequest, check_template_kwargs, turns_of
from tokenspeed.serving.protocol.completions import check_ids
from tokenspeed.serving.protocol.parse import parse_object
from tokenspeed.serving.rendering import rendered

__all__ = ["DetokenizeRequest", "TokenizeRequest", "detokenize", "tokenize"]


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A text (``prompt``), or ``messages`` to render first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


@post("/tokenize", status_code=200)
async def tokenize(request: HttpRequest) -> dict[str, Any]:
    """Ids of a text or of a rendered conversation."""
    context = context_of(request)
    value, size = await read_json(request)
    body = parse_object(value, TokenizeRequest, {})
    context.check_model(body.model)
    context.check_text()
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    check_template_kwargs(body.chat_template_kwargs)
    info, llm = context.llm.info, context.llm
    text, special = body.prompt or "", True
    if body.messages is not None:
        chat = ChatRequest(messages=body.messages, tools=body.tools)
        template = llm.tokenizer.template_for(bool(body.tools))
        if template is None or not body.messages:
            raise RequestError("messages: there are none, or the model has no chat template", param="messages")
        messages, tools = turns_of(chat, context.limits, context.tool_parser)
        render = partial(
            rendered,
            template,
            messages,
            tools=tools or None,
            add_generation_prompt=body.add_generation_prompt,
            extra=body.chat_template_kwargs,
        )
        text, special = await llm.off_loop(size, render), False
    if body.add_special_tokens is not None:
        special = body.add_special_tokens
    tokens = await llm.encode(text, add_special_tokens=special, param="prompt")
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [llm.tokenizer.piece(token).decode("utf-8", "replace") for token in tokens]
    return answer


@post("/detokenize", status_code=200)
async def detokenize(request: HttpRequest) -> dict[str, str]:
    """Text of ids."""
    context = context_of(request)
    value, size = await read_json(request)
    body = parse_object(value, DetokenizeRequest, {})
    context.check_model(body.model)
    context.check_text()
    check_ids(body.tokens, context.limits, "tokens")
    decode = partial(context.llm.tokenizer.decode, body.tokens, skip_special_tokens=body.skip_special_tokens)
    return {"prompt": await context.llm.off_loop(size, decode)}

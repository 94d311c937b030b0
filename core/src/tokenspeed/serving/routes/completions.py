"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import msgspec
from litestar import Response, post

from tokenspeed.errors import RequestError
from tokenspeed.serving.body import read_json
from tokenspeed.serving.constraint import answer_grammar, check_fields
from tokenspeed.serving.context import HttpRequest, ServerContext, context_of
from tokenspeed.serving.generation import Choice, Delta, Generation, GenerationRequest, TokenEntry
from tokenspeed.serving.protocol.answers import raise_failed, usage
from tokenspeed.serving.protocol.completions import (
    CompletionRequest,
    LogprobsBuilder,
    join_logprobs,
    parse_completion,
    prompts_of,
)
from tokenspeed.serving.protocol.sampling import (
    StreamOptions,
    check_context,
    parse_stream_options,
    sampling_params,
    stop_strings,
)
from tokenspeed.serving.protocol.structured import answer_of
from tokenspeed.serving.sse import DONE, answer, event, event_stream, stream_answer, to_json

__all__ = ["completions"]

_DEFAULT_MAX_TOKENS = 16


@post("/v1/completions", status_code=200)
async def completions(request: HttpRequest) -> Response[Any]:
    """A text completion, whole or streamed."""
    context = context_of(request)
    context.admit()
    value, _ = await read_json(request)
    job = await _prepare(request, context, value)
    generation = context.submit(job.request)
    if job.body.stream:
        return await stream_answer(request, generation, _stream(job, generation))
    return Response(to_json(await answer(request, generation, _whole(job, generation))), media_type="application/json")


@dataclass
class _Job:
    """One request on its way; ``echoes`` holds each prompt's text where it is to be repeated."""

    context: ServerContext
    body: CompletionRequest
    options: StreamOptions
    request: GenerationRequest
    echoes: list[str]
    model: str

    def echo(self, choice: Choice) -> str:
        return self.echoes[choice.index // self.body.n] if self.body.echo else ""

    def prompt_tokens(self, choice: Choice) -> list[int]:
        return list(self.request.prompts[choice.index // self.body.n])

    def logprobs(self, choice: Choice) -> LogprobsBuilder | None:
        return (
            None
            if self.body.logprobs is None
            else LogprobsBuilder(self.context.llm.tokenizer, self.body.logprobs, len(self.echo(choice)))
        )


async def _prepare(http: HttpRequest, context: ServerContext, value: dict[str, Any]) -> _Job:
    body = parse_completion(value)
    context.check_model(body.model)
    context.check_text()
    options = parse_stream_options(body)
    limits = context.limits
    logprobs = -1 if body.logprobs is None else body.logprobs
    wanted = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_params(
        body, limits, max_new_tokens=wanted, logprobs=logprobs, prompt_logprobs=logprobs if body.echo else -1
    )
    stops = stop_strings(body)
    held = answer_of(body.response_format, body.structured_outputs)
    if held is not None:
        check_fields(body, held.param)
        grammar = await context.llm.checked(partial(answer_grammar, held, context.grammar_checker))
    prompts, echoes = [], []
    rows = prompts_of(body.prompt, limits, body.n)
    texts = [row for row in rows if isinstance(row, str)]  # all or none of them
    encoded = await context.llm.encode_all(texts, add_special_tokens=body.add_special_tokens, param="prompt")
    ids = encoded or [row for row in rows if not isinstance(row, str)]
    for row, tokens in zip(rows, ids, strict=True):
        if not tokens:
            raise RequestError("prompt: has no tokens", param="prompt")
        if body.max_tokens is None:
            wanted = min(wanted, check_context(len(tokens), None, limits, default=wanted))
        else:
            check_context(len(tokens), wanted, limits)
        prompts.append(tokens)
        if body.echo:
            echoes.append(row if isinstance(row, str) else context.llm.tokenizer.decode(row))
    session = context.session_of(
        http, body.session_id, body.retain_s, salt=body.cache_salt, choices=len(prompts) * body.n
    )
    prefill_only = wanted == 0
    params = msgspec.structs.replace(params, max_new_tokens=wanted or 1, min_tokens=min(params.min_tokens, wanted))
    if prefill_only:
        params = msgspec.structs.replace(params, logprobs=-1)
    request = GenerationRequest(
        prompts=prompts,
        params=params,
        n=body.n,
        grammar=grammar if held is not None else None,
        grammar_param=held.param if held is not None else "",
        stop=() if prefill_only else stops,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        priority=body.priority,
        salt=(body.cache_salt or "").encode(),
        request_id=context.new_id("cmpl", http),
        streaming=body.stream,
        prefill_only=prefill_only,
        session=session,
    )
    return _Job(context, body, options, request, echoes, body.model or context.model_names[0])


async def _whole(job: _Job, generation: Generation) -> dict[str, Any]:
    texts = [[job.echo(choice)] for choice in generation.choices]
    entries: list[list[Any]] = [[] for _ in generation.choices]
    shown: dict[int, msgspec.Raw] = {}
    while (deltas := await generation.next()) is not None:
        for delta in deltas:
            raise_failed(delta)
            at = delta.choice.index
            texts[at].append(delta.text)
            entries[at].extend(delta.entries or ())
            if delta.finish:
                shown[at] = await _ended(job, delta, "".join(texts[at]), entries[at])
                entries[at] = []
    return {
        "id": job.request.request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": job.model,
        "choices": [choice for _, choice in sorted(shown.items())],
        "usage": usage(generation.choices, job.body.n),
    }


async def _ended(job: _Job, end: Delta, text: str, entries: Sequence[TokenEntry]) -> msgspec.Raw:
    """A choice of the answer as JSON. Log probabilities of many choices or of a long one take long: others get their turn between the pieces."""
    choice, builder = end.choice, job.logprobs(end.choice)
    logprobs = None
    if builder is not None:
        echoed = builder.prompt(job.prompt_tokens(choice), choice.prompt_logprobs) if job.body.echo else ()
        pieces = []
        for piece in chain(echoed, builder.pieces(entries)):
            pieces.append(piece)
            await asyncio.sleep(0)
        logprobs = join_logprobs(pieces)
        choice.prompt_logprobs = None  # told; the collector would walk them all while other choices run
    shown = {
        "index": choice.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": end.finish,
        "stop_reason": end.stop_reason,
    }
    return msgspec.Raw(to_json(shown))


def _stream(job: _Job, generation: Generation) -> AsyncGenerator[bytes, None]:
    head = {"id": job.request.request_id, "object": "text_completion", "created": int(time.time()), "model": job.model}
    opening = b"data: " + to_json(head)[:-1] + b',"choices":[{"index":'
    heads = [opening + b"%d" % at + b',"text":' for at in range(len(generation.choices))]
    echoing = {choice.index for choice in generation.choices} if job.body.echo else set()
    builders = [job.logprobs(choice) for choice in generation.choices]
    plain_tail = b',"usage":null}\n\n' if job.options.shows_usage else b"}\n\n"

    def chunks(delta: Delta) -> Sequence[bytes]:
        at = delta.choice.index
        text, builder = delta.text, builders[at]
        logprobs = builder.output(delta.entries) if builder is not None and delta.entries else None
        if at in echoing:
            echoing.discard(at)
            text = job.echo(delta.choice) + text
            if builder is not None:
                echoed = builder.prompt(job.prompt_tokens(delta.choice), delta.choice.prompt_logprobs)
                logprobs = join_logprobs(chain(echoed, () if logprobs is None else (logprobs,)))
                delta.choice.prompt_logprobs = None
        if not (text or logprobs or delta.finish):
            return ()
        tail = plain_tail
        if job.options.continuous_usage_stats:
            tail = b',"usage":' + to_json(usage(generation.choices, job.body.n, running=True)) + b"}\n\n"
        shown = b"null" if logprobs is None else to_json(logprobs)
        begin = (heads[at], to_json(text), b',"logprobs":', shown, b',"finish_reason":')
        if not delta.finish:
            return (*begin, b"null}]", tail)
        return (*begin, to_json(delta.finish), b',"stop_reason":', to_json(delta.stop_reason), b"}]", tail)

    def last() -> bytes:
        totals = {**head, "choices": [], "usage": usage(generation.choices, job.body.n)}
        return (event(totals) if job.options.include_usage else b"") + DONE

    return event_stream(generation, chunks, last)

"""``POST /generate``: the native route. Text or ids in; text, ids and what they cost out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import Response, post
from msgspec import Meta

from tokenspeed.errors import RequestError
from tokenspeed.messages import TokenLogprobs
from tokenspeed.serving.body import read_json
from tokenspeed.serving.constraint import answer_grammar, check_fields
from tokenspeed.serving.context import HttpRequest, ServerContext, context_of
from tokenspeed.serving.generation import Choice, Delta, Generation, GenerationRequest
from tokenspeed.serving.protocol.answers import finite, raise_failed, usage
from tokenspeed.serving.protocol.completions import check_ids
from tokenspeed.serving.protocol.parse import Refused, parse_object
from tokenspeed.serving.protocol.sampling import (
    RetainSeconds,
    SamplingFields,
    SessionId,
    check_context,
    sampling_params,
    stop_strings,
)
from tokenspeed.serving.protocol.structured import native_answer
from tokenspeed.serving.sse import DONE, answer, event, event_stream, stream_answer, to_json

__all__ = ["GenerateBody", "GenerateSampling", "generate"]

_DEFAULT_MAX_TOKENS = 128


class GenerateBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body. ``top_logprobs_num`` alternatives per token with ``return_logprob``; ``return_prompt_logprob`` also for the prompt's tokens."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] = {}
    stream: bool = False
    return_logprob: bool = False
    return_prompt_logprob: bool = False
    top_logprobs_num: Annotated[int, Meta(ge=0)] = 0
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    session_id: SessionId | None = None
    retain_s: RetainSeconds | None = None
    model: str | None = None


class GenerateSampling(SamplingFields, kw_only=True, frozen=True):
    """``sampling_params``: the fields of the other routes, with the native names for the two limits and for what the text must be."""

    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    json_schema: dict[str, Any] | str | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    ebnf: Annotated[str, Meta(min_length=1)] | None = None
    structural_tag: dict[str, Any] | str | None = None


_REFUSED = {
    "max_tokens": Refused("the native route takes max_new_tokens"),
}
_OUTSIDE = (
    "model",
    "stream",
    "stream_options",
    "priority",
    "cache_salt",
    "session_id",
    "retain_s",
    "user",
)


@post("/generate", status_code=200)
async def generate(request: HttpRequest) -> Response[Any]:
    """Generate from a text or from ids. A stream sends what is new in each event."""
    context = context_of(request)
    context.admit()
    value, _ = await read_json(request)
    job = await _prepare(request, context, value)
    generation = context.submit(job.request)
    if job.body.stream:
        return await stream_answer(request, generation, _stream(job, generation))
    shown = await answer(request, generation, _whole(job, generation))
    return Response(to_json(shown if job.request.n > 1 else shown[0]), media_type="application/json")


@dataclass
class _Job:
    context: ServerContext
    body: GenerateBody
    request: GenerationRequest


async def _prepare(http: HttpRequest, context: ServerContext, value: dict[str, Any]) -> _Job:
    _check_single(value)
    body = parse_object(value, GenerateBody, {})
    context.check_model(body.model)
    given = {name: field for name, field in body.sampling_params.items() if field is not None}
    for name in _OUTSIDE:
        if name in given:
            raise RequestError(
                f"sampling_params.{name} belongs beside sampling_params", param=f"sampling_params.{name}"
            )
    if "min_tokens" in given:  # a field of the struct, which the other routes share
        raise RequestError(
            "sampling_params.min_tokens is not supported: the native route takes min_new_tokens",
            param="sampling_params.min_tokens",
        )
    sampling = parse_object(given, GenerateSampling, _REFUSED, "sampling_params.")
    sampling = msgspec.structs.replace(sampling, min_tokens=sampling.min_new_tokens)
    limits = context.limits
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give either text or input_ids", param="text")
    if (body.top_logprobs_num or body.return_prompt_logprob) and not body.return_logprob:
        raise RequestError("top_logprobs_num and return_prompt_logprob need return_logprob", param="return_logprob")
    logprobs = body.top_logprobs_num if body.return_logprob else -1
    wanted = sampling.max_new_tokens
    params = sampling_params(
        sampling,
        limits,
        max_new_tokens=wanted or limits.max_model_len,
        logprobs=logprobs,
        prompt_logprobs=logprobs if body.return_prompt_logprob else -1,
        logprobs_field="top_logprobs_num",
    )
    session = context.session_of(http, body.session_id, body.retain_s, salt=body.cache_salt, choices=sampling.n)
    stops = stop_strings(sampling)
    forms = {name: getattr(sampling, name) for name in ("json_schema", "regex", "ebnf", "structural_tag")}
    held = native_answer(forms, sampling.structured_outputs, "sampling_params.")
    if held is not None:
        check_fields(sampling, held.param, prefix="sampling_params.", minimum="min_new_tokens")
        grammar = await context.llm.checked(partial(answer_grammar, held, context.grammar_checker))
    if body.input_ids is not None:
        check_ids(body.input_ids, limits, "input_ids")
        tokens = body.input_ids
    else:
        tokens = await context.llm.encode(body.text or "", add_special_tokens=True, param="text")
        if not tokens:
            raise RequestError("text: has no tokens", param="text")
    room = check_context(len(tokens), wanted, limits, default=_DEFAULT_MAX_TOKENS, param="max_new_tokens")
    request = GenerationRequest(
        prompts=[tokens],
        params=msgspec.structs.replace(params, max_new_tokens=room, min_tokens=min(params.min_tokens, room)),
        n=sampling.n,
        grammar=grammar if held is not None else None,
        grammar_param=held.param if held is not None else "",
        stop=stops,
        include_stop=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        priority=body.priority,
        salt=(body.cache_salt or "").encode(),
        request_id=context.new_id("gen", http),
        streaming=body.stream,
        session=session,
    )
    return _Job(context, body, request)


def _check_single(value: dict[str, Any]) -> None:
    """Raises ``RequestError`` for lists of prompts, which other servers' native routes take."""
    ids = value.get("input_ids")
    for name, several in (
        ("text", isinstance(value.get("text"), list)),
        ("input_ids", isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)),
    ):
        if several:
            raise RequestError(
                f"{name}: one prompt a request; send one request for each, or ask /v1/completions, which takes a list of prompts",
                param=name,
                code="invalid_type",
            )


def _logprob(token: int, found: TokenLogprobs | None) -> dict[str, Any]:
    if found is None:
        return {"id": token, "logprob": None, "top": []}
    top = [{"id": i, "logprob": finite(p)} for i, p in zip(found.top_ids, found.top_logprobs, strict=True)]
    return {"id": token, "logprob": finite(found.logprob), "rank": found.rank, "top": top}


def _meta(job: _Job, choice: Choice, delta: Delta | None) -> dict[str, Any]:
    ended = delta is not None and delta.finish
    counts = usage([choice], 1, running=not ended)
    meta = {
        "id": job.request.request_id,
        "index": choice.index,
        "prompt_tokens": choice.prompt_tokens,
        "completion_tokens": choice.output_tokens,
        "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
        "finish_reason": {"type": delta.finish, "matched": delta.stop_reason} if ended and delta is not None else None,
    }
    if ended:
        meta["request_stats"] = counts["request_stats"][0] if counts["request_stats"] else None
    return meta


def _prompt_logprobs(job: _Job, choice: Choice) -> dict[str, Any]:
    if not job.body.return_prompt_logprob:
        return {}
    found = choice.prompt_logprobs or []
    return {
        "prompt_logprobs": [_logprob(token, entry) for token, entry in zip(job.request.prompts[0], found, strict=False)]
    }


async def _whole(job: _Job, generation: Generation) -> list[dict[str, Any]]:
    texts: list[list[str]] = [[] for _ in generation.choices]
    ids: list[list[int]] = [[] for _ in generation.choices]
    logprobs: list[list[dict[str, Any]]] = [[] for _ in generation.choices]
    ends: dict[int, Delta] = {}
    while (deltas := await generation.next()) is not None:
        for delta in deltas:
            raise_failed(delta)
            at = delta.choice.index
            texts[at].append(delta.text)
            ids[at] += delta.tokens
            logprobs[at] += [_logprob(entry.token, entry.logprobs) for entry in delta.entries or ()]
            if delta.finish:
                ends[at] = delta
    shown = []
    for at, end in sorted(ends.items()):
        meta = _meta(job, end.choice, end)
        if job.body.return_logprob:
            meta["output_logprobs"] = logprobs[at]
            meta.update(_prompt_logprobs(job, end.choice))
        shown.append({"text": "".join(texts[at]), "output_ids": ids[at], "meta_info": meta})
    return shown


def _stream(job: _Job, generation: Generation) -> AsyncGenerator[bytes, None]:
    begun: set[int] = set()

    def chunks(delta: Delta) -> Sequence[bytes]:
        meta = _meta(job, delta.choice, delta)
        if job.body.return_logprob:
            meta["output_logprobs"] = [_logprob(entry.token, entry.logprobs) for entry in delta.entries or ()]
            if delta.choice.index not in begun:
                begun.add(delta.choice.index)
                meta.update(_prompt_logprobs(job, delta.choice))
        return (event({"text": delta.text, "output_ids": delta.tokens, "meta_info": meta}),)

    return event_stream(generation, chunks, lambda: DONE)

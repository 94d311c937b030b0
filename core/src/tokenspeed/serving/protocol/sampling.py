"""Sampling fields shared by the generating routes, their ranges, and their way into ``SamplingParams``."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokenspeed.errors import RequestError
from tokenspeed.messages import SamplingParams
from tokenspeed.serving.protocol.parse import Refused, parse_object

__all__ = [
    "REFUSED_SAMPLING",
    "Limits",
    "RetainSeconds",
    "SamplingFields",
    "SessionId",
    "StreamOptions",
    "check_context",
    "parse_stream_options",
    "sampling_params",
    "stop_strings",
]

_MAX_STOPS = 64
_MAX_STOP_CHARS = 4096
_MAX_BIASES = 1024
_MAX_STOP_IDS = 1024
#: A logit is divided by it or multiplied with it: what is far from 1 leaves no finite numbers.
_PENALTIES = (0.01, 100.0)
_INT64 = Meta(ge=-(2**63), le=2**63 - 1)

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
#: Bounded again, with a sentence, in ``protocol.sessions``: both may come as headers too.
SessionId = Annotated[str, Meta(max_length=128)]
RetainSeconds = Annotated[float, Meta(ge=0, le=3600)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that requests are checked against before anything is allocated for them."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int
    max_n: int


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``stream_options``: a last chunk with the usage; usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def shows_usage(self) -> bool:
        """Chunks have a ``usage`` field, if only null."""
        return bool(self.include_usage or self.continuous_usage_stats)


class SamplingFields(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of every generating route, by the names of OpenAI and vLLM."""

    model: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    n: int = 1
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[
        float, Meta(extra_json_schema={"minimum": _PENALTIES[0], "maximum": _PENALTIES[1]})
    ] = 1.0
    seed: Annotated[int, _INT64] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: Count = 0
    logit_bias: dict[str, float] = {}
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    session_id: SessionId | None = None
    retain_s: RetainSeconds | None = None
    user: str | None = None
    structured_outputs: dict[str, Any] | None = None


_MOVED = 'it is structured_outputs now: {{"{}": ..}}'
REFUSED_SAMPLING: dict[str, Refused] = {
    "best_of": Refused("ask for n choices instead", (1,)),
    "use_beam_search": Refused("beam search is not served", (False,)),
    "length_penalty": Refused("it belongs to beam search", (1.0, 1)),
    "early_stopping": Refused("it belongs to beam search", (False,)),
    "guided_json": Refused(_MOVED.format("json")),
    "guided_regex": Refused(_MOVED.format("regex")),
    "guided_choice": Refused(_MOVED.format("choice")),
    "guided_grammar": Refused(_MOVED.format("grammar")),
    "guided_whitespace_pattern": Refused("the grammar backend bounds white space"),
    "guided_decoding_backend": Refused("the server's --grammar-backend says which"),
    "bad_words": Refused("ban tokens with logit_bias instead", ([],)),
    "allowed_token_ids": Refused("restrict tokens with logit_bias instead"),
    "prompt_logprobs": Refused("ask /v1/completions with echo and logprobs, or /generate with return_logprob"),
    "truncate_prompt_tokens": Refused("shorten the prompt in the client"),
    "spaces_between_special_tokens": Refused("special tokens are shown as they are", (True,)),
    "logits_processors": Refused("no processors can be given by a request", ([],)),
    "return_token_ids": Refused("ask /generate for ids", (False,)),
    "return_tokens_as_token_ids": Refused("ask /generate for ids", (False,)),
    "kv_transfer_params": Refused("disaggregation is not served"),
    "store": Refused("answers are not kept", (False,)),
    "metadata": Refused("answers are not kept", ({},)),
    "service_tier": Refused("there is one tier", ("auto", "default")),
    "safety_identifier": Refused("use the user field"),
    "prompt_cache_key": Refused("prefixes are shared automatically; cache_salt separates them"),
    "prompt_cache_retention": Refused(
        "prefixes stay as long as there is room; session_id and retain_s keep them longer"
    ),
    "request_id": Refused("the server names requests; the answer carries the id"),
}


def parse_stream_options(fields: SamplingFields) -> StreamOptions:
    """``stream_options``, checked.

    Raises:
        RequestError: unknown options, or no stream.
    """
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options: needs stream to be true", param="stream_options")
    return parse_object(fields.stream_options or {}, StreamOptions, {}, "stream_options.")


def stop_strings(fields: SamplingFields) -> tuple[str, ...]:
    """The stop strings, checked.

    Raises:
        RequestError: too many, too long, or empty ones.
    """
    stops = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    if len(stops) > _MAX_STOPS:
        raise RequestError(f"stop: at most {_MAX_STOPS} strings, got {len(stops)}", param="stop")
    if sum(map(len, stops)) > _MAX_STOP_CHARS:
        raise RequestError(f"stop: at most {_MAX_STOP_CHARS} characters in all", param="stop")
    if not all(stops):
        raise RequestError("stop: an empty string would stop every answer at once", param="stop")
    return stops


def sampling_params(
    fields: SamplingFields,
    limits: Limits,
    *,
    max_new_tokens: int,
    logprobs: int = -1,
    prompt_logprobs: int = -1,
    logprobs_field: str = "logprobs",
) -> SamplingParams:
    """The engine's form of the sampling fields, every bound checked.

    Raises:
        RequestError: naming the field and its range.
    """
    if not 1 <= fields.n <= limits.max_n:
        raise RequestError(f"n: must lie in 1..{limits.max_n}, got {fields.n}", param="n")
    if logprobs > limits.max_logprobs or prompt_logprobs > limits.max_logprobs:
        raise RequestError(
            f"{logprobs_field}: at most {limits.max_logprobs} alternatives per token", param=logprobs_field
        )
    low, high = _PENALTIES
    if not low <= fields.repetition_penalty <= high:
        raise RequestError(
            f"repetition_penalty: must lie in {low:g}..{high:g}, got {fields.repetition_penalty:g}",
            param="repetition_penalty",
        )
    if len(fields.stop_token_ids) > _MAX_STOP_IDS:
        raise RequestError(f"stop_token_ids: at most {_MAX_STOP_IDS}", param="stop_token_ids")
    for token in fields.stop_token_ids:
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"stop_token_ids: {token} is no token id (0..{limits.vocab_size - 1})", param="stop_token_ids"
            )
    if fields.min_tokens > max_new_tokens:
        raise RequestError(
            f"min_tokens: {fields.min_tokens} is more than max_tokens, {max_new_tokens}", param="min_tokens"
        )
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=fields.temperature,
        top_k=0 if fields.top_k < 0 or fields.top_k >= limits.vocab_size else fields.top_k,
        top_p=fields.top_p,
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        seed=None if fields.seed is None else fields.seed & 0x7FFF_FFFF_FFFF_FFFF,
        stop_token_ids=tuple(dict.fromkeys(fields.stop_token_ids)),
        ignore_eos=fields.ignore_eos,
        min_tokens=fields.min_tokens,
        logit_bias=_biases(fields.logit_bias, limits),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _biases(given: dict[str, float], limits: Limits) -> tuple[tuple[int, float], ...]:
    if len(given) > _MAX_BIASES:
        raise RequestError(f"logit_bias: at most {_MAX_BIASES} entries", param="logit_bias")
    biases: dict[int, float] = {}
    for key, bias in given.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"logit_bias: {key[:40]!r} is no token id (0..{limits.vocab_size - 1})", param="logit_bias"
            )
        if not math.isfinite(bias) or not -100 <= bias <= 100:
            raise RequestError(
                f"logit_bias: the bias of {token} must lie in -100..100, got {bias:g}", param="logit_bias"
            )
        if token in biases:
            raise RequestError(f"logit_bias: token {token} is named twice", param="logit_bias")
        biases[token] = bias
    return tuple(biases.items())


def check_context(
    prompt_tokens: int,
    wanted: int | None,
    limits: Limits,
    *,
    default: int | None = None,
    param: str = "max_tokens",
    prompt_param: str = "prompt",
) -> int:
    """Tokens that may be generated: what was asked for, or ``default``, or all the room there is.

    A request whose prompt and ``wanted`` do not fit together is refused rather than shortened; only the default is.

    Raises:
        RequestError: code ``context_length_exceeded``.
    """
    room = limits.max_model_len - prompt_tokens
    if room < 1:
        raise RequestError(
            f"this model's context holds {limits.max_model_len} tokens; the prompt has {prompt_tokens} and leaves no room for an answer",
            param=prompt_param,
            code="context_length_exceeded",
        )
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise RequestError(
            f"this model's context holds {limits.max_model_len} tokens; the prompt has {prompt_tokens} and {param} asks for {wanted} more",
            param=param,
            code="context_length_exceeded",
        )
    return wanted

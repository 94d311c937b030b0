"""What callers of ``tokenspeed.LLM`` give, checked as the server checks a request's JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenspeed.errors import RequestError
from tokenspeed.messages import Grammar, SamplingParams
from tokenspeed.serving.constraint import GrammarChecker, NoBackend, answer_grammar, check_fields
from tokenspeed.serving.protocol.parse import parse_object
from tokenspeed.serving.protocol.sampling import Limits, SamplingFields, sampling_params, stop_strings
from tokenspeed.serving.protocol.structured import answer_of
from tokenspeed.serving.tokenizer import Tokenizer

__all__ = [
    "Prompt",
    "checked_params",
    "checked_stop",
    "grammar_of",
    "listed_params",
    "listed_prompts",
    "prompt_ids",
    "text_ids",
]

Prompt = str | Sequence[int]
#: Fields of ``SamplingParams`` that are not fields of a request's JSON under the same name and type.
_CONVERTED = ("max_new_tokens", "logprobs", "prompt_logprobs", "logit_bias", "stop_token_ids")


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts one by one: a text or a list of ids is one. Raises ``RequestError`` for what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, dict)):
        raise RequestError(
            f"prompts: give a text, token ids, or a list of these, not {_kind(prompts)}", param="prompts"
        )
    listed: list[Any] = list(prompts)
    return [listed] if listed and all(isinstance(item, int) for item in listed) else listed


def listed_params(
    params: SamplingParams | Sequence[SamplingParams | None] | None, count: int
) -> list[SamplingParams | None]:
    """One for each of ``count`` prompts. Raises ``RequestError`` for another number or another type."""
    every: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params] * count
    if len(every) != count:
        raise RequestError(
            f"{count} prompts but {len(every)} sampling parameters: give one for all or one each", param="params"
        )
    for one in every:
        if one is not None and not isinstance(one, SamplingParams):
            raise RequestError(f"params: give SamplingParams, not {_kind(one)}", param="params")
    return every


def grammar_of(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    checker: GrammarChecker | NoBackend,
    params: Iterable[SamplingParams | None],
) -> tuple[Grammar | None, str]:
    """What texts are held to by the fields that a request's JSON has for it, and which field says so (empty where none does).

    Raises:
        RequestError: it is malformed or would not be enforced, or one of ``params`` cannot be kept beside it.
    """
    answer = answer_of(response_format, structured_outputs)
    if answer is None:
        return None, ""
    for one in params:
        if one is not None:
            check_fields(one, answer.param)
    return answer_grammar(answer, checker), answer.param


def text_ids(text: str, tokenizer: Tokenizer, *, param: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text. Raises ``RequestError`` where it cannot be encoded."""
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (UnicodeError, TypeError) as error:  # lone surrogates
        raise RequestError(f"{param}: the text cannot be encoded: {error}", param=param) from error


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Token ids of one prompt. Raises ``RequestError`` where it is empty, no text or ids, or holds ids that the model does not know."""
    if isinstance(prompt, str):
        ids = text_ids(prompt, tokenizer, param="prompt")
    elif isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, dict)):
        ids = list(prompt)
    else:
        raise RequestError(f"prompt: give a text or token ids, not {_kind(prompt)}", param="prompt")
    if not ids:
        raise RequestError("the prompt holds no token; give at least one", param="prompt")
    for token in ids:
        if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= token < vocab_size:
            raise RequestError(f"prompt: {token!r:.40} is no token id (0..{vocab_size - 1})", param="prompt")
    return ids


def checked_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings; one string is one of them. Raises ``RequestError`` for empty ones, too many, or other types."""
    listed = [stop] if isinstance(stop, str) else list(stop)
    for text in listed:
        if not isinstance(text, str):
            raise RequestError(f"stop: give texts, not {_kind(text)}", param="stop")
    return stop_strings(SamplingFields(stop=listed))


def checked_params(params: SamplingParams, limits: Limits) -> SamplingParams:
    """``params`` through the same checks as a request's JSON. Raises ``RequestError`` naming the field."""
    if type(params.max_new_tokens) is not int or params.max_new_tokens < 1:
        raise RequestError(
            f"max_new_tokens: {params.max_new_tokens!r} is not a whole number from 1 on", param="max_new_tokens"
        )
    plain = {name: getattr(params, name) for name in params.__struct_fields__ if name not in _CONVERTED}
    plain |= {
        "stop_token_ids": list(params.stop_token_ids),
        "logit_bias": {str(token): bias for token, bias in params.logit_bias},
    }
    fields = parse_object(plain, SamplingFields, {})
    # msgspec compares with the smallest number above 0, which is 0 where a library has denormals flushed in the calling thread.
    if not fields.top_p > 0:
        raise RequestError(f"top_p: must be above 0, got {params.top_p}", param="top_p")
    return sampling_params(
        fields,
        limits,
        max_new_tokens=params.max_new_tokens,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"

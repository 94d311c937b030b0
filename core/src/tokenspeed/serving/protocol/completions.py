"""``POST /v1/completions``: the request, checked, and the legacy log-probability shape."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any

from msgspec import Meta

from tokenspeed.errors import RequestError
from tokenspeed.messages import TokenLogprobs
from tokenspeed.serving.generation import TokenEntry
from tokenspeed.serving.protocol.answers import finite, token_text
from tokenspeed.serving.protocol.parse import Refused, parse_object
from tokenspeed.serving.protocol.sampling import REFUSED_SAMPLING, Limits, SamplingFields
from tokenspeed.serving.tokenizer import Tokenizer

__all__ = [
    "REFUSED_COMPLETION",
    "CompletionRequest",
    "LogprobsBuilder",
    "check_ids",
    "join_logprobs",
    "parse_completion",
    "prompts_of",
]

_MAX_PROMPTS = 2048
#: Tokens whose log probabilities are written at a time: a few milliseconds.
_PIECE = 256


class CompletionRequest(SamplingFields, kw_only=True, frozen=True):
    """The body of a text completion."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    echo: bool = False
    add_special_tokens: bool = True
    response_format: dict[str, Any] | None = None


REFUSED_COMPLETION: dict[str, Refused] = {
    **REFUSED_SAMPLING,
    "suffix": Refused("infilling is not served", ("",)),
    "max_completion_tokens": Refused("text completions take max_tokens"),
    "top_logprobs": Refused("text completions take logprobs as a number"),
    "tools": Refused("tools belong to /v1/chat/completions", ([],)),
    "tool_choice": Refused("tools belong to /v1/chat/completions", ("none",)),
    "messages": Refused("messages belong to /v1/chat/completions"),
    "prompt_embeds": Refused("embeddings cannot be given as a prompt"),
}


def parse_completion(value: Mapping[str, Any]) -> CompletionRequest:
    """The checked request.

    Raises:
        RequestError: naming the field.
    """
    given = value.get("prompt")
    if isinstance(given, list) and len(given) > _MAX_PROMPTS:  # before rows are made of them
        rows = (row for row in given if type(row) is not int)
        if next(islice(rows, _MAX_PROMPTS, None), None) is not None:
            raise RequestError(f"prompt: at most {_MAX_PROMPTS} prompts in one request", param="prompt")
    request = parse_object(value, CompletionRequest, REFUSED_COMPLETION)
    if request.max_tokens == 0 and (request.response_format or request.structured_outputs):
        raise RequestError("max_tokens: 0 writes no answer that could have a form", param="max_tokens")
    if request.max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens: must be at least 1; 0 is for scoring a prompt, with echo", param="max_tokens")
    return request


def prompts_of(prompt: str | list[str | int | list[int]], limits: Limits, n: int) -> list[str | list[int]]:
    """The prompts of a request: a text, a list of texts, ids, or a list of lists of ids.

    Raises:
        RequestError: a mixture, an empty prompt, an id outside the vocabulary, or too many prompts.
    """
    rows: Sequence[str | int | list[int]] = [prompt] if isinstance(prompt, str) else prompt
    if not rows:
        raise RequestError("prompt: is empty", param="prompt")
    if len(rows) > max(limits.max_model_len, _MAX_PROMPTS):  # before the rows are looked at one by one
        raise RequestError(
            f"prompt: {len(rows)} entries are neither ids that fit into {limits.max_model_len} tokens nor at most {_MAX_PROMPTS} prompts",
            param="prompt",
            code="context_length_exceeded" if isinstance(rows[0], int) else None,
        )
    kinds = {type(row) for row in rows}
    if len(kinds) > 1:
        raise RequestError("prompt: texts and token ids cannot be mixed", param="prompt")
    prompts: list[Any] = [list(rows)] if kinds == {int} else list(rows)
    if len(prompts) * n > _MAX_PROMPTS:
        raise RequestError(
            f"prompt: at most {_MAX_PROMPTS} choices in one request, got {len(prompts)} prompts with n {n}",
            param="prompt",
        )
    for row in prompts:
        if not isinstance(row, str):
            check_ids(row, limits, "prompt")
    return prompts


def check_ids(ids: Sequence[int], limits: Limits, param: str) -> None:
    """Refuse an empty row, ids outside the vocabulary and rows that cannot fit, before anything is made of them."""
    if not ids:
        raise RequestError(f"{param}: an empty list of token ids", param=param)
    if len(ids) > limits.max_model_len:
        raise RequestError(
            f"{param}: this model's context holds {limits.max_model_len} tokens, got {len(ids)}",
            param=param,
            code="context_length_exceeded",
        )
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        bad = next(token for token in ids if not 0 <= token < limits.vocab_size)
        raise RequestError(f"{param}: {bad} is no token id (0..{limits.vocab_size - 1})", param=param)


class LogprobsBuilder:
    """The legacy shape ``{tokens, token_logprobs, top_logprobs, text_offset}``; offsets count characters of the choice's text.

    Args:
        tokenizer: gives the tokens' texts.
        top: alternatives per token; the chosen token is always among those shown.
        base: characters of text that stand before the first generated token (the echoed prompt).
    """

    def __init__(self, tokenizer: Tokenizer, top: int, base: int = 0) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._base = base

    def prompt(
        self, tokens: Sequence[int], found: Sequence[TokenLogprobs | None] | None
    ) -> Generator[dict[str, Any], None, None]:
        """Of an echoed prompt, in pieces for ``join_logprobs``; its first token has nothing before it and so no probability."""
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=True)
        offset = 0
        for begin in range(0, len(tokens), _PIECE):
            shape = _empty()
            for at, token in enumerate(tokens[begin : begin + _PIECE], begin):
                self._add(shape, token, found[at] if found is not None and at < len(found) else None, offset)
                offset += len(detokenizer.feed((token,)))
            yield shape

    def pieces(self, entries: Sequence[TokenEntry]) -> Generator[dict[str, Any], None, None]:
        """Of a whole answer's tokens, in pieces."""
        for begin in range(0, len(entries), _PIECE):
            yield self.output(entries[begin : begin + _PIECE])

    def output(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """Of generated tokens."""
        shape = _empty()
        for entry in entries:
            self._add(shape, entry.token, entry.logprobs, self._base + entry.offset)
        return shape

    def _add(self, shape: dict[str, Any], token: int, found: TokenLogprobs | None, offset: int) -> None:
        text = token_text(self._tokenizer, token)
        shape["tokens"].append(text)
        shape["text_offset"].append(offset)
        if found is None:
            shape["token_logprobs"].append(None)
            shape["top_logprobs"].append(None)
            return
        top = {
            token_text(self._tokenizer, i): finite(p)
            for i, p in list(zip(found.top_ids, found.top_logprobs, strict=True))[: self._top]
        }
        top.setdefault(text, finite(found.logprob))
        shape["token_logprobs"].append(finite(found.logprob))
        shape["top_logprobs"].append(top)


def _empty() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def join_logprobs(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The pieces of one choice as one."""
    whole = _empty()
    for part in parts:
        for name, values in part.items():
            whole[name] += values
    return whole

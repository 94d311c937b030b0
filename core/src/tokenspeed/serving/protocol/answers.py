"""Pieces that answers share: usage, errors, log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tokenspeed.errors import EngineError, RequestError, TokenSpeedError
from tokenspeed.serving.generation import Choice, Delta, TokenEntry
from tokenspeed.serving.tokenizer import Tokenizer

__all__ = [
    "chat_logprobs",
    "error_body",
    "error_status",
    "finite",
    "raise_failed",
    "request_stats",
    "token_text",
    "usage",
]


def error_status(error: Exception) -> int:
    """HTTP status of an error."""
    if isinstance(error, RequestError):
        return error.status
    return 503 if isinstance(error, EngineError) else 500


def error_body(error: Exception) -> dict[str, Any]:
    """The OpenAI form of an error. Only errors raised on purpose show their text."""
    status = error_status(error)
    message = str(error) if isinstance(error, TokenSpeedError) else "internal error; the server's log has the details"
    kinds = {401: "authentication_error", 404: "not_found_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    param, code = (
        (error.param, error.code)
        if isinstance(error, RequestError)
        else (None, "engine_unavailable" if status == 503 else None)
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(choices: Sequence[Choice], n: int, *, running: bool = False) -> dict[str, Any]:
    """Usage of an answer. A prompt counts once for its ``n`` choices, with the cached tokens of its first.

    ``request_stats`` (ours) holds what the engine measured for each choice, in ms, once the choices have ended.
    """
    firsts = choices[::n]
    prompt = sum(choice.prompt_tokens for choice in firsts)
    completion = sum(choice.output_tokens for choice in choices)
    body: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(max(choice.cached_tokens, 0) for choice in firsts)},
    }
    if not running:
        body["request_stats"] = [request_stats(choice) for choice in choices if choice.stats is not None]
    return body


def request_stats(choice: Choice) -> dict[str, Any]:
    """An entry of ``request_stats``: plain JSON of a choice that has ended with figures; times in ms, to the microsecond."""
    assert choice.stats is not None
    stats = msgspec.structs.asdict(choice.stats)
    cached = max(choice.cached_tokens, 0)
    shown: dict[str, Any] = {"index": choice.index, **stats}
    shown.update(prompt_tokens=choice.prompt_tokens, cached_tokens=cached, output_tokens=choice.output_tokens)
    shown["hit_rate"] = round(cached / choice.prompt_tokens, 4) if choice.prompt_tokens else 0.0
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in shown.items()}


def raise_failed(delta: Delta) -> None:
    """Raises ``RequestError`` where the engine refused a choice at submit (400, or what it says) or it failed while it ran (500)."""
    if delta.finish == "error":
        refused = delta.choice.stats is None
        raise RequestError(
            delta.error or "the request failed in the engine",
            param=delta.param or None,
            code="refused" if refused else "failed",
            status=delta.status or (400 if refused else 500),
        )


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as log probabilities show it: its text, or its bytes escaped where they are no whole characters."""
    piece = tokenizer.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenEntry], top: int) -> dict[str, Any]:
    """The chat shape: one entry per token, each with its own ``top`` alternatives and the bytes that rebuild split characters."""
    content = []
    for entry in entries:
        found = entry.logprobs
        shown = _chat_token(tokenizer, entry.token, found.logprob)
        shown["top_logprobs"] = [
            _chat_token(tokenizer, *pair) for pair in list(zip(found.top_ids, found.top_logprobs, strict=True))[:top]
        ]
        content.append(shown)
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {"token": token_text(tokenizer, token), "logprob": finite(logprob), "bytes": list(tokenizer.piece(token))}


def finite(logprob: float) -> float:
    """JSON has no infinity: a token that cannot occur gets the value that OpenAI uses for "very unlikely"."""
    return logprob if logprob > -9999.0 else -9999.0

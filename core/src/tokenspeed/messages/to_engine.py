"""Messages from the server process to the engine."""

from __future__ import annotations

import msgspec

__all__ = [
    "DEFAULT_NEW_TOKENS",
    "AbortRequest",
    "ControlRequest",
    "GenerateRequest",
    "Grammar",
    "SamplingParams",
    "StopRequest",
    "ToEngine",
]

DEFAULT_NEW_TOKENS = 128


class SamplingParams(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """How tokens of one request are drawn; the server has validated every range.

    Attributes:
        max_new_tokens: at least 1.
        temperature: 0 is greedy.
        top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
        seed: same seed and prompt, same tokens, whatever else is in the batch; ``None`` draws one.
        stop_token_ids: ids that end the request besides the model's own end tokens.
        ignore_eos: the model's end tokens do not end the request.
        min_tokens: end tokens are masked before this many.
        logit_bias: (id, bias) pairs added to the logits.
        logprobs: alternatives per output token; -1 is off, 0 the chosen token only.
        prompt_logprobs: the same for prompt tokens.
    """

    max_new_tokens: int = DEFAULT_NEW_TOKENS
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1
    prompt_logprobs: int = -1


class Grammar(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """What the tokens of a request must match.

    Attributes:
        kind: of ``interfaces.grammar.GRAMMAR_KINDS``.
        value: the grammar's text; empty for ``json_object``.
        reasoning_end: token ids of the end-of-reasoning marker: the grammar begins after they were generated; empty is from the first token on.
    """

    kind: str
    value: str = ""
    reasoning_end: tuple[int, ...] = ()


class GenerateRequest(msgspec.Struct, tag="generate", array_like=True, frozen=True):
    """A request for tokens.

    Attributes:
        rid: unique among live requests of the server.
        tokens: little-endian int32 ids.
        arrival_s: when the server took it, in seconds of ``time.monotonic`` (one clock for all processes of a host): its times count from there. 0 is
            unknown: they count from when the engine takes it.
        grammar: constrains the tokens; the request waits in the engine until it is compiled.
        session: number of the session that it is a turn of; -1 is none. Its pages are kept above others for ``retain_us`` after a good end.
    """

    rid: int
    tokens: bytes
    params: SamplingParams
    arrival_s: float
    priority: int = 0
    salt: bytes = b""
    grammar: Grammar | None = None
    session: int = -1
    retain_us: int = 0


class AbortRequest(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """The client is gone or asked for it: end the request at once, in whatever state; an ``abort`` output follows if it was alive."""

    rid: int


class StopRequest(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """A stop string matched in the server: end the request in good order; outputs already under way are dropped by the server."""

    rid: int


class ControlRequest(msgspec.Struct, tag="control", array_like=True, frozen=True):
    """An operation on the engine as a whole: ``flush_cache``, ``info``, ``stats``, ``shutdown`` (ends the engine in good order); or on ``session``:
    ``prefetch_session``, ``release_session``.
    """

    id: int
    method: str
    session: int = -1


ToEngine = GenerateRequest | AbortRequest | StopRequest | ControlRequest

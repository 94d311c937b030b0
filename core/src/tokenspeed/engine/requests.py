"""Requests as the engine keeps them while they live, and their admission."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from tokenspeed._scheduler import RequestInfo
from tokenspeed.errors import RequestError
from tokenspeed.messages import HIT_CUTS, GenerateRequest, RequestStats, SamplingParams, TokenLogprobs
from tokenspeed.runtime.plan import SlotGrammar, SlotRequest

__all__ = ["Admission", "LiveRequest"]

_SEED_BITS = 64
#: Fields that end up in arrays of 32 or 64 bits; msgpack can carry larger numbers.
_INTEGERS = ("max_new_tokens", "top_k", "min_tokens", "logprobs", "prompt_logprobs")
_LIMIT = 2**31


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """One request from its arrival to its last output. Times in microseconds of the engine's clock; 0 is not yet.

    Attributes:
        id: the scheduler's number for it; ``rid`` the server's.
        end_ids: ids that end it.
        output: ids generated so far.
        prompt_logprobs: filled chunk by chunk; ``None`` when not asked for or already sent.
        cached_tokens: prompt tokens found in the cache at its first admission; -1 before it. Of these, ``host_tokens`` came back from the host tier, and of
            these ``storage_tokens`` from the KV store. ``hit_cut``, one of ``HIT_CUTS``, says why no more, ``hit_cut_group`` in which cache group.
        grammar: what its tokens must match, once that is compiled; ``grammar_us`` is when it was, or when the request ended waiting for it.
    """

    id: int
    rid: int
    prompt: bytes
    prompt_len: int
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    arrival_us: int
    priority: int = 0
    salt: bytes = b""
    session: int = -1
    retain_us: int = 0
    output: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = -1
    host_tokens: int = 0
    storage_tokens: int = 0
    hit_cut: str = "none"
    hit_cut_group: int = 0
    scheduled_us: int = 0
    first_token_us: int = 0
    preemptions: int = 0
    preempted_us: int = 0
    retracted_us: int = 0
    grammar: SlotGrammar | None = None
    grammar_us: int = 0

    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """(prompt) int32, read-only."""
        return np.frombuffer(self.prompt, dtype="<i4")

    def found(self, info: RequestInfo) -> None:
        """What the scheduler knows of its cached tokens."""
        self.host_tokens, self.storage_tokens, self.hit_cut = (
            info.host_tokens,
            info.storage_tokens,
            HIT_CUTS[info.hit_cut],
        )
        self.hit_cut_group = info.hit_cut_group

    def enter_slot(self, slot: int, context_len: int, now_us: int) -> SlotRequest:
        """It begins, or goes on after a retraction, in ``slot`` with ``context_len`` tokens found in the cache."""
        if not self.scheduled_us:
            self.scheduled_us = now_us
            # A hit never counts more than the prompt, and is counted once however often the request is retracted.
            self.cached_tokens = min(context_len, self.prompt_len)
        if self.retracted_us:
            self.preempted_us += now_us - self.retracted_us
            self.retracted_us = 0
        params = self.params
        # They were sent; computing the prompt again must not cost them again.
        if params.prompt_logprobs >= 0 and self.prompt_logprobs is None:
            params = msgspec.structs.replace(params, prompt_logprobs=-1)
        return SlotRequest(
            slot,
            params,
            self.seed,
            tuple(sorted(self.end_ids)),
            self.prompt,
            np.array(self.output, dtype="<i4").tobytes(),
            self.id,
            self.grammar,
        )

    def retract(self, now_us: int) -> None:
        """It lost its slot to others."""
        self.preemptions += 1
        self.retracted_us = now_us

    def stats(self, now_us: int) -> RequestStats:
        """What it cost, as of now."""
        first = self.first_token_us or now_us
        scheduled = self.scheduled_us or now_us
        preempted = self.preempted_us + (now_us - self.retracted_us if self.retracted_us else 0)
        decoded, decode_us = len(self.output) - 1, now_us - first
        return RequestStats(
            prompt_tokens=self.prompt_len,
            cached_tokens=max(self.cached_tokens, 0),
            output_tokens=len(self.output),
            queue_ms=(scheduled - self.arrival_us) / 1000,
            prefill_ms=(first - scheduled) / 1000,
            ttft_ms=(first - self.arrival_us) / 1000,
            total_ms=(now_us - self.arrival_us) / 1000,
            preemptions=self.preemptions,
            preempted_ms=preempted / 1000,
            grammar_ms=(self.grammar_us - self.arrival_us) / 1000 if self.grammar_us else 0.0,
            host_tokens=self.host_tokens,
            storage_tokens=self.storage_tokens,
            hit_cut=self.hit_cut,
            hit_cut_group=self.hit_cut_group,
            decode_tok_s=decoded * 1e6 / decode_us if decoded > 0 and decode_us > 0 else 0.0,
        )


class Admission:
    """Turns messages into requests; checks what would hurt the engine, although the server has checked it before.

    Args:
        end_ids: the model's own end tokens.
        seed: seeds the requests that bring none.
    """

    def __init__(self, *, vocab_size: int, end_ids: Iterable[int], seed: int) -> None:
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._random = random.Random(seed)
        self._next_id = 0

    def admit(self, message: GenerateRequest, now_us: int) -> LiveRequest:
        """A new request.

        Raises:
            RequestError: its tokens or parameters do not fit the model.
        """
        params = message.params
        if len(message.tokens) % 4:
            raise RequestError(
                f"the prompt holds {len(message.tokens)} bytes; token ids are 4 bytes each", param="prompt"
            )
        ids = np.frombuffer(message.tokens, dtype="<i4")
        if not len(ids):
            raise RequestError("the prompt holds no token; send at least one", param="prompt")
        self._check_ids("prompt", int(ids.min()), int(ids.max()))
        if params.stop_token_ids:
            self._check_ids("stop_token_ids", min(params.stop_token_ids), max(params.stop_token_ids))
        if params.logit_bias:
            biased = [token for token, _ in params.logit_bias]
            self._check_ids("logit_bias", min(biased), max(biased))
        for name in _INTEGERS:
            _check_range(name, getattr(params, name))
        _check_range("priority", message.priority)
        _check_session(message.session, message.retain_us)
        if params.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {params.max_new_tokens}; it must be at least 1", param="max_tokens")
        if message.grammar is not None and message.grammar.reasoning_end:
            ends = message.grammar.reasoning_end
            self._check_ids("grammar.reasoning_end", min(ends), max(ends))
        # A grammar that is complete allows nothing but an end: it ends the request all the same.
        unending = params.ignore_eos and message.grammar is None
        seed = self._random.getrandbits(_SEED_BITS) if params.seed is None else params.seed
        self._next_id += 1
        return LiveRequest(
            id=self._next_id,
            rid=message.rid,
            prompt=message.tokens,
            prompt_len=len(ids),
            params=params,
            seed=_signed(seed),
            end_ids=frozenset(params.stop_token_ids) | (frozenset() if unending else self._end_ids),
            arrival_us=_arrival_us(message.arrival_s, now_us),
            priority=message.priority,
            salt=message.salt,
            session=message.session,
            retain_us=message.retain_us,
            prompt_logprobs=[None] * len(ids) if params.prompt_logprobs >= 0 else None,
        )

    def _check_ids(self, name: str, low: int, high: int) -> None:
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise RequestError(
                f"{name} holds token id {wrong}; the model knows 0 to {self._vocab_size - 1}", param=name
            )


def _arrival_us(arrival_s: float, now_us: int) -> int:
    """The server's time where it can be one: it has waited in the socket, and in a long step, since then."""
    return int(arrival_s * 1e6) if 0 < arrival_s * 1e6 <= now_us else now_us


def _check_range(name: str, value: int) -> None:
    if not -_LIMIT <= value < _LIMIT:
        raise RequestError(f"{name} is {value}; it must be between {-_LIMIT} and {_LIMIT - 1}", param=name)


def _check_session(session: int, retain_us: int) -> None:
    """The scheduler judges what both say; here they only have to be numbers of 64 bits."""
    if not -1 <= session < 1 << 63:
        raise RequestError(f"session is {session}; it must be -1 or a number of 63 bits", param="session_id")
    if not 0 <= retain_us < 1 << 62:
        raise RequestError(f"retain_us is {retain_us}; it must not be negative or absurd", param="retain_s")


def _signed(seed: int) -> int:
    """The low 64 bits of any integer as a signed one, which is what tensors hold."""
    low = seed & ((1 << _SEED_BITS) - 1)
    return low - (1 << _SEED_BITS) if low >> (_SEED_BITS - 1) else low

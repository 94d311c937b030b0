"""The requests behind one HTTP answer: outputs come in from the engine, text goes out.

Life of a choice: the engine's outputs are put into the generation's inbox by the receiver (``push``); the handler's task wakes once per step, takes all
that came (``next``), and each choice turns tokens into text, looks for stop strings and keeps count (``consume``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tokenspeed.errors import TokenSpeedError
from tokenspeed.messages import Grammar, RequestStats, SamplingParams, TokenLogprobs, TokenOutput
from tokenspeed.serving.detokenizer import Detokenizer
from tokenspeed.serving.marker_spans import MarkerSpans
from tokenspeed.serving.protocol.sessions import NO_SESSION, Session
from tokenspeed.serving.stops import StopMatcher

__all__ = ["Choice", "Delta", "Generation", "GenerationOwner", "GenerationRequest", "TokenEntry"]


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A validated request, ready for the engine.

    Attributes:
        prompts: token ids; every prompt gets ``n`` choices, numbered prompt by prompt.
        stop: stop strings. include_stop: they stay in the text.
        streaming: the caller wants every step; otherwise it is woken at the end only.
        hide_stop_token: the text of a stopping token is left out, whatever ``include_stop`` says.
        prefill_only: the one token that the engine draws is discarded (``max_tokens`` 0).
        grammar: what the tokens are held to; ``grammar_param`` is the field that asked for it.
        markers: text of tokens whose places in the text are wanted, by id.
        session: whose turn it is, and how long its pages are kept after it.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    salt: bytes = b""
    request_id: str = ""
    streaming: bool = False
    hide_stop_token: bool = False
    prefill_only: bool = False
    grammar: Grammar | None = None
    grammar_param: str = ""
    markers: Mapping[int, str] = field(default_factory=dict)
    session: Session = NO_SESSION


@dataclass(slots=True)
class TokenEntry:
    """One generated token with its log probabilities; ``offset`` is the number of characters of text before it."""

    token: int
    logprobs: TokenLogprobs
    offset: int


@dataclass(slots=True)
class Delta:
    """What one choice gained: text that can be told, the tokens behind it, and, with the last one, how it ended.

    ``spans`` are the places in ``text`` of the request's ``markers`` that came as tokens; ``None`` where it has none.
    """

    choice: Choice
    text: str
    tokens: list[int]
    entries: list[TokenEntry] | None = None
    finish: str = ""
    stop_reason: int | str | None = None
    error: str = ""
    param: str = ""
    status: int = 0
    spans: Sequence[tuple[int, int]] | None = None


class Choice:
    """One engine request and its text.

    Attributes:
        output_tokens: tokens sampled, the stopping token included, up to a stop string's last token.
        cached_tokens: prompt tokens from the cache, -1 before the first output.
    """

    __slots__ = (
        "_chars",
        "_detokenizer",
        "_dropping",
        "_markers",
        "_matcher",
        "_spans",
        "_want_logprobs",
        "cached_tokens",
        "finish",
        "first_s",
        "generation",
        "index",
        "last_s",
        "min_tokens",
        "output_tokens",
        "prompt_logprobs",
        "prompt_tokens",
        "rid",
        "stats",
        "submit_s",
    )  # fmt: skip

    def __init__(
        self, generation: Generation, index: int, rid: int, prompt_tokens: int, detokenizer: Detokenizer
    ) -> None:
        request = generation.request
        self.generation = generation
        self.index = index
        self.rid = rid
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0
        self.cached_tokens = -1
        self.min_tokens = request.params.min_tokens
        self.finish = ""
        self.stats: RequestStats | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.submit_s = time.monotonic()
        self.first_s = self.last_s = 0.0
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(request.stop, include=request.include_stop) if request.stop else None
        self._want_logprobs = request.params.logprobs >= 0
        self._chars = 0
        self._markers = request.markers
        self._spans = MarkerSpans() if request.markers else None
        self._dropping = request.prefill_only

    def consume(self, item: TokenOutput) -> Delta | None:
        """Account for one output; ``None`` when there is nothing to tell yet."""
        if item.cached_tokens >= 0:
            self.cached_tokens = min(item.cached_tokens, self.prompt_tokens)
        if item.prompt_logprobs is not None:
            self.prompt_logprobs = item.prompt_logprobs
        delta = Delta(self, "", []) if self._dropping else self._take(item)
        if item.finish:
            self._end(item, delta)
        if self._spans is not None:
            delta.text, delta.spans = self._spans.release(delta.text, closed=bool(item.finish))
        if item.finish:
            return delta
        if not delta.text and not delta.entries and not delta.tokens:
            return None
        return delta

    def _take(self, item: TokenOutput) -> Delta:
        tokens = item.tokens
        request = self.generation.request
        # The stopping token has no text.
        quiet = item.finish == "stop" and (request.hide_stop_token or not request.include_stop)
        if self._matcher is None and not self._want_logprobs and self._spans is None:
            self.output_tokens += len(tokens)
            return Delta(self, self._detokenizer.feed(tokens[:-1] if quiet else tokens) if tokens else "", tokens)
        delta = Delta(self, "", [], [] if self._want_logprobs else None)
        parts: list[str] = []
        for at, token in enumerate(tokens):
            self.output_tokens += 1
            delta.tokens.append(token)
            if delta.entries is not None and item.logprobs is not None:
                delta.entries.append(TokenEntry(token, item.logprobs[at], self._chars))
            text = "" if quiet and at == len(tokens) - 1 else self._detokenizer.feed((token,))
            self._chars += len(text)
            if self._spans is not None and text and (marker := self._markers.get(token)) and text.endswith(marker):
                self._spans.mark(self._chars - len(marker), self._chars)
            parts.append(self._match(text))
            if self._matcher is not None and self._matcher.matched is not None:
                self._dropping = True
                if not item.finish:
                    self.generation.stop(self)
                break
        delta.text = "".join(parts)
        return delta

    def _match(self, text: str) -> str:
        if self._matcher is None or self.output_tokens < self.min_tokens:
            return text
        return self._matcher.feed(text)

    def _end(self, item: TokenOutput, delta: Delta) -> None:
        matched = self._matcher.matched if self._matcher is not None else None
        if matched is None and not self._dropping:
            rest = self._detokenizer.finish()
            delta.text += self._matcher.feed(rest) + self._matcher.finish() if self._matcher is not None else rest
        if matched is not None and item.finish != "error":
            delta.finish, delta.stop_reason = "stop", matched
        else:
            delta.finish, delta.stop_reason = item.finish, item.stop_reason
        if self.generation.request.prefill_only and item.finish == "stop":
            delta.finish, delta.stop_reason = "length", None
        delta.error, delta.param, delta.status = item.error, item.param, item.status
        if delta.param == "grammar":  # the engine does not know which field of the request that came from
            delta.param = self.generation.request.grammar_param
        self.finish = delta.finish
        self.stats = item.stats


class GenerationOwner(Protocol):
    """What a generation tells the one who keeps the live requests."""

    def stopped(self, choice: Choice) -> None:
        """A stop string ended ``choice``: the engine must end it too."""

    def finished(self, choice: Choice) -> None:
        """The last output of ``choice`` was taken, and its reader asked on or left."""

    def aborted(self, generation: Generation, reason: str) -> None:
        """Nobody waits for the choices any more."""


class Generation:
    """The choices of one HTTP answer and their inbox. Made by ``AsyncLLM.submit``."""

    def __init__(self, request: GenerationRequest, owner: GenerationOwner) -> None:
        self.request = request
        self.choices: list[Choice] = []
        self.abort_reason = ""
        self._owner = owner
        self._inbox: list[tuple[Choice, TokenOutput]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: TokenSpeedError | None = None
        self._open = 0
        # Ended, and their last deltas are in the reader's hands: it may still fail over them.
        self._told: list[Choice] = []
        self._eager = request.streaming or bool(request.stop)

    def add(self, choice: Choice) -> None:
        """Take a choice in; all are added before the first output."""
        self.choices.append(choice)
        self._open += 1

    def push(self, choice: Choice, item: TokenOutput) -> None:
        """An output arrived; wakes the reader where it has something to do."""
        self._inbox.append((choice, item))
        if self._eager or item.finish:
            self._wake()

    def fail(self, error: TokenSpeedError) -> None:
        """No more outputs will come: ``next`` raises ``error`` once what arrived before is read."""
        if self._failure is None:
            self._failure = error
        self._wake()

    def stop(self, choice: Choice) -> None:
        """A stop string ended ``choice``."""
        self._owner.stopped(choice)

    def abort(self, reason: str) -> None:
        """Nobody reads on (``reason`` says why: ``disconnect``, ``error``): end all choices in the engine at once; ``next`` returns ``None`` from now on."""
        lost = [choice for choice in self._told if reason == "error" and choice.finish != "error"]
        for choice in lost:
            choice.finish = ""  # the engine ended it, and its answer is lost here
            self._told.remove(choice)
        self._settle()
        if not self.abort_reason and (self._open or lost):
            self.abort_reason = reason
            self._owner.aborted(self, reason)
            self._wake()

    def _settle(self) -> None:
        told, self._told = self._told, []
        for choice in told:
            self._owner.finished(choice)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self) -> list[Delta] | None:
        """Everything that came since the last call; ``None`` when all choices ended or the generation was aborted.

        Raises:
            TokenSpeedError: the engine died, or the server gave the generation up.
        """
        self._settle()
        while True:
            if self.abort_reason or not self._open:
                return None
            if self._inbox:
                items, self._inbox = self._inbox, []
                deltas = []
                for choice, item in items:
                    delta = choice.consume(item)
                    if delta is None:
                        continue
                    if delta.finish:
                        self._open -= 1
                        self._told.append(choice)
                    deltas.append(delta)
                if deltas:
                    return deltas
                continue
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None

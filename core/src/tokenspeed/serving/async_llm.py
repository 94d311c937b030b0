"""AsyncLLM: texts in, streams of text out; owns the requests that are alive and hands the engine's outputs to them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from tokenspeed.errors import EngineError, RequestError, TokenSpeedError
from tokenspeed.messages import AbortRequest, EngineInfo, GenerateRequest, Outputs, StopRequest
from tokenspeed.serving.engine_client import EngineClient
from tokenspeed.serving.generation import Choice, Generation, GenerationRequest
from tokenspeed.serving.metrics import ServerMetrics
from tokenspeed.serving.protocol.answers import request_stats
from tokenspeed.serving.protocol.sessions import Session
from tokenspeed.serving.tokenizer import NoTokenizer, Tokenizer, pack_tokens

__all__ = ["AsyncLLM"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Texts up to this many bytes are tokenised on the event loop (well under a millisecond); longer ones in a thread.
_INLINE_BYTES = 2048
#: A thread takes about this much of many texts at a time, so that other requests' texts get their turn between.
_BATCH_BYTES = 64 * 1024
_ORPHAN_LOG_S = 10.0


class AsyncLLM:
    """The requests of one server process.

    Args:
        client: a client that is not started yet; ``start`` does it.
        tokenizer: of the served model.
        metrics: counters to keep.
        log_requests: log a line per request as it arrives. log_stats: log one when it ends.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        *,
        metrics: ServerMetrics | None = None,
        log_requests: bool = False,
        log_stats: bool = False,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.metrics = metrics or ServerMetrics()
        self._log_requests = log_requests
        self._log_stats = log_stats
        self._live: dict[int, Choice] = {}
        self._closing: set[int] = set()  # aborted here; the engine's last word is still to come
        self._asked: set[int] = set()  # alive, and the engine was asked to end them: counted as aborted already
        self._rids = itertools.count(1)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="check grammar")
        self._orphan_logged_s = -_ORPHAN_LOG_S
        #: called when the engine has died and every request was told.
        self.on_death: Callable[[EngineError], None] | None = None

    def start(self) -> None:
        """Begin to listen to the engine; in the running event loop."""
        self.client.start(self._outputs, self._died)

    def close(self) -> None:
        """Give threads and sockets back."""
        self.client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._checks.shutdown(wait=False, cancel_futures=True)

    @property
    def info(self) -> EngineInfo:
        """Of the running engine. Raises ``RequestError`` 503 before it is ready."""
        if self.client.info is None:
            raise RequestError("the model is still loading; try again soon", code="starting", status=503)
        return self.client.info

    @property
    def live_requests(self) -> int:
        """Engine requests that have not ended."""
        return len(self._live)

    async def off_loop(self, size: int, work: Callable[[], _T]) -> _T:
        """Run ``work`` on a text of ``size`` bytes: at once when short, in the tokenising thread when long, so that streams go on."""
        if size <= _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def checked(self, work: Callable[[], _T]) -> _T:
        """Run ``work``, which checks a grammar, in a thread of its own: a short one may take long, and texts are tokenised meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._checks, work)

    async def encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text, refused by its length in bytes where no tokenisation could make it fit.

        Raises:
            RequestError: it is too long, or holds what cannot be encoded.
        """
        (tokens,) = await self.encode_all([text], add_special_tokens=add_special_tokens, param=param)
        return tokens

    async def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool, param: str) -> list[list[int]]:
        """Token ids of each text. They count together: many short ones keep the event loop as long as one long one.

        Raises:
            RequestError: one is too long, or holds what cannot be encoded.
        """
        longest, limit = self.tokenizer.max_piece_bytes, self.info.max_model_len
        total = 0
        for text in texts:
            if longest is not None and len(text) > limit * longest:
                raise RequestError(
                    f"{param}: a text of {len(text)} characters cannot fit into the model's context of {limit} tokens",
                    param=param,
                    code="context_length_exceeded",
                )
            total += len(text)
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)
        rows: list[list[int]] = []
        try:
            for batch in _batches(texts):
                rows += await self.off_loop(total, lambda batch=batch: [encode(text) for text in batch])  # type: ignore[misc]
            return rows
        except (UnicodeError, TypeError) as error:
            raise RequestError(f"{param}: the text cannot be encoded: {error}", param=param) from error

    def submit(self, request: GenerationRequest) -> Generation:
        """Hand a validated request to the engine.

        Raises:
            EngineError: the engine is gone. RequestError: stop strings where there is no text to find them in.
        """
        if self.client.failure is not None:
            raise self.client.failure
        if request.stop and isinstance(self.tokenizer, NoTokenizer):
            raise RequestError(
                "stop: the server runs without a tokenizer (--skip-tokenizer-init): give stop_token_ids", param="stop"
            )
        generation = Generation(request, self)
        arrival = time.monotonic()
        sends = []
        for at, prompt in enumerate(request.prompts):
            tokens = pack_tokens(prompt)
            for i in range(request.n):
                rid = next(self._rids)
                detokenizer = self.tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens)
                choice = Choice(generation, at * request.n + i, rid, len(prompt), detokenizer)
                generation.add(choice)
                self._live[rid] = choice
                params = request.params
                if i and params.seed is not None:  # different choices, yet the same set each time
                    params = msgspec.structs.replace(params, seed=(params.seed + i) & 0x7FFF_FFFF_FFFF_FFFF)
                sends.append(
                    GenerateRequest(
                        rid, tokens, params, arrival, request.priority, request.salt, request.grammar, *request.session
                    )
                )
        self.metrics.submitted += len(sends)
        if self._log_requests:
            lengths = ", ".join(str(len(prompt)) for prompt in request.prompts)
            _log.info("Request %s: prompt tokens %s, n %d, %s", request.request_id, lengths, request.n, request.params)
        for message in sends:
            self.client.send(message)
        return generation

    def abort_requests(self, request_id: str | None, reason: str) -> int:
        """Ask the engine to end the requests of one id, or all; their clients get finish reason ``abort``.

        Args:
            request_id: an answer's, with its prefix or without: a client gives its own without one. ``None``: all.

        Returns:
            How many; those that were asked to end before do not count again.
        """
        rids = [
            rid
            for rid, choice in self._live.items()
            if rid not in self._asked and request_id in (None, *_names(choice.generation.request.request_id))
        ]
        for rid in rids:
            self.client.send(AbortRequest(rid))
        self._asked.update(rids)
        self.metrics.aborted[reason] += len(rids)
        return len(rids)

    def release_session(self, session: Session) -> None:
        """Keep nothing for it any longer; nobody waits for the engine's answer."""
        self.client.tell("release_session", session.number)

    def fail_all(self, error: TokenSpeedError, reason: str) -> None:
        """Give every request up: its client gets ``error``, the engine is told to end it."""
        choices, self._live = list(self._live.values()), {}
        now = time.monotonic()
        for choice in choices:
            self._closing.add(choice.rid)
            self._tell_abort(choice.rid, reason)
            self._end(choice, "error", now)
            choice.generation.fail(error)

    def _tell_abort(self, rid: int, reason: str) -> None:
        """Ask the engine to end a request that is alive no more here; counted once, for who asked first."""
        if rid in self._asked:
            self._asked.discard(rid)
            return
        self.client.send(AbortRequest(rid))
        self.metrics.aborted[reason] += 1

    def _outputs(self, outputs: Outputs) -> None:
        now = time.monotonic()
        live, itl = self._live, self.metrics.itl
        for item in outputs.items:
            choice = live.get(item.rid)
            if choice is None:
                self._orphan(item.rid, ended=bool(item.finish))
                continue
            if item.tokens:
                if choice.first_s:
                    itl.observe(now - choice.last_s)
                else:
                    choice.first_s = now
                    self.metrics.ttft.observe(now - choice.submit_s)
                choice.last_s = now
            choice.generation.push(choice, item)
            if item.finish:
                del live[item.rid]
                self._asked.discard(item.rid)

    def finished(self, choice: Choice) -> None:
        """The last output of ``choice`` was taken: account for it."""
        refused = choice.finish == "error" and choice.stats is None  # a client's mistake: nothing failed here
        self.metrics.count_finished(choice, "refused" if refused else choice.finish, time.monotonic())
        if self._log_stats:
            _log.info("Request %s[%d]: %s", choice.generation.request.request_id, choice.index, _stats_line(choice))

    def _orphan(self, rid: int, *, ended: bool) -> None:
        """An output for a request that is not alive here: expected for aborted ones until their last; any other is told to the engine, once."""
        if ended:
            self._closing.discard(rid)
            return
        if rid in self._closing:
            return
        self.metrics.orphans += 1
        self._closing.add(rid)
        self.metrics.aborted["orphan"] += 1
        self.client.send(AbortRequest(rid))
        now = time.monotonic()
        if now - self._orphan_logged_s >= _ORPHAN_LOG_S:
            self._orphan_logged_s = now
            _log.warning(
                "The engine works on request %d that the server does not know: told it to end that (%d so far)",
                rid,
                self.metrics.orphans,
            )

    def _end(self, choice: Choice, reason: str, now: float) -> None:
        """Account for a request whose last output nobody will take."""
        choice.finish = reason
        self.metrics.count_finished(choice, reason, now)

    def stopped(self, choice: Choice) -> None:
        """A stop string ended ``choice``: end it in the engine; its last output follows."""
        self.client.send(StopRequest(choice.rid))

    def aborted(self, generation: Generation, reason: str) -> None:
        """Drop the choices that are alive and tell the engine at once."""
        now = time.monotonic()
        # Where the engine failed one choice, that one is the error; its siblings are ended because of it.
        ours = reason == "error" and all(choice.finish != "error" for choice in generation.choices)
        for choice in generation.choices:
            if choice.finish:
                continue
            if self._live.pop(choice.rid, None) is not None:
                self._closing.add(choice.rid)
                self._tell_abort(choice.rid, reason)
            self._end(choice, "error" if ours else "abort", now)

    def _died(self, error: EngineError) -> None:
        choices, self._live = list(self._live.values()), {}
        self._asked.clear()
        now = time.monotonic()
        for choice in choices:
            self._end(choice, "error", now)
            choice.generation.fail(error)
        if self.on_death is not None:
            self.on_death(error)


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Runs of texts, each of about ``_BATCH_BYTES``."""
    begin = size = 0
    for at, text in enumerate(texts):
        size += len(text)
        if size >= _BATCH_BYTES:
            yield texts[begin : at + 1]
            begin, size = at + 1, 0
    if begin < len(texts):
        yield texts[begin:]


def _names(request_id: str) -> tuple[str, str]:
    """An answer's id, and what follows its prefix."""
    return request_id, request_id.partition("-")[2]


def _stats_line(choice: Choice) -> str:
    """How it ended, and what ``usage.request_stats`` of an answer holds, by the same names."""
    shown = {"prompt_tokens": choice.prompt_tokens, "output_tokens": choice.output_tokens}
    if choice.stats is not None:
        shown = request_stats(choice)
        del shown["index"]
    return f"{choice.finish}; {', '.join(f'{name} {value}' for name, value in shown.items())}"

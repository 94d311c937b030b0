"""An engine without a model: speaks the messages over real sockets and says what a script tells it to.

For tests and benchmarks of the server. It keeps the rules that a real engine keeps: one last output per request, ``abort`` outputs for aborted requests,
control requests answered by id, statistics after steps.
"""

from __future__ import annotations

import asyncio
import tempfile
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from tokenspeed.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineStats,
    FromEngine,
    GenerateRequest,
    Outputs,
    RequestStats,
    StopRequest,
    TokenLogprobs,
    TokenOutput,
    decode_to_engine,
    encode,
)

__all__ = ["FakeEngine", "Reply", "default_info"]


@dataclass(kw_only=True)
class Reply:
    """What a request gets.

    Attributes:
        tokens: ids, sent ``chunk`` at a time; more than ``max_new_tokens`` are cut with finish ``length``.
        finish: reason sent with the last token; ``None`` leaves the request running for ever.
        stop_reason: the id of a stop token.
        alternatives: by position, ids shown as top alternatives.
        cached: cached prompt tokens reported.
        error: refuses the request with this text; with ``tokens`` it fails behind them instead. param: the field that the refusal is about.
            status: the HTTP status that the engine names with it.
    """

    tokens: Sequence[int] = ()
    chunk: int = 1
    finish: str | None = "stop"
    stop_reason: int | None = None
    alternatives: Sequence[Sequence[int]] = ()
    cached: int = 0
    error: str = ""
    param: str = ""
    status: int = 0


@dataclass
class _Run:
    request: GenerateRequest
    reply: Reply
    sent: int = 0
    stopped: bool = False
    prompt: array[int] = field(default_factory=lambda: array("i"))


def default_info(max_model_len: int = 512, vocab_size: int = 257) -> EngineInfo:
    """A description that fits the byte tokenizer."""
    return EngineInfo(max_model_len, vocab_size, 16, 256, 1 << 20, 1 << 20, "fp32", "cpu", 0.0, {"plugins": []}, {})


class FakeEngine:
    """Runs as tasks in the event loop of the test.

    Args:
        script: what a request gets; asked once per request.
        info: sent when ready.
        step_s: pause between steps; 0 only yields to the loop.
        folder: where the ipc sockets live; a private temporary one by default.
    """

    def __init__(
        self,
        script: Callable[[GenerateRequest], Reply],
        *,
        info: EngineInfo | None = None,
        step_s: float = 0.0,
        folder: Path | None = None,
    ) -> None:
        self._own = None if folder is not None else tempfile.TemporaryDirectory(prefix="fake-engine-")
        base = folder if folder is not None else Path(self._own.name)  # type: ignore[union-attr]
        self.to_engine = f"ipc://{base}/to"
        self.from_engine = f"ipc://{base}/from"
        self.info = info or default_info()
        self.script = script
        self.step_s = step_s
        self.requests: list[GenerateRequest] = []
        self.aborts: list[int] = []
        self.stops: list[int] = []
        self.control: list[str] = []
        self.sessions: dict[int, int] = {}  # number to prompt tokens: those that are kept
        self.answering = True  # False imitates a hang: nothing is read or sent
        self.running: dict[int, _Run] = {}
        self._finished = self._aborted = self._generated = self._prompt = self._cached = self._steps = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._work = asyncio.Event()

    async def start(self, *, ready: bool = True) -> None:
        """Bind and begin; with ``ready`` the first message is sent at once."""
        self._context = zmq.asyncio.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._push = self._context.socket(zmq.PUSH)
        self._push.setsockopt(zmq.LINGER, 0)
        self._pull.bind(self.to_engine)
        self._push.bind(self.from_engine)
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._steps_loop())]
        if ready:  # a PUSH socket waits for its peer
            self._tasks.append(asyncio.create_task(self.send(EngineReady(self.info))))

    async def close(self) -> None:
        """Stop and give the sockets back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pull.close(0)
        self._push.close(0)
        self._context.term()
        if self._own is not None:
            self._own.cleanup()

    async def send(self, message: FromEngine) -> None:
        """One message to the server."""
        await self._push.send(encode(message))

    async def send_raw(self, frame: bytes) -> None:
        """Any bytes to the server."""
        await self._push.send(frame)

    async def fail(self, text: str) -> None:
        """Report that the engine cannot go on."""
        await self.send(EngineFailed("internal", text))

    def stats(self) -> EngineStats:
        """Gauges that follow the running requests: a page per request."""
        active = len(self.running)
        return EngineStats(
            waiting=0, running=active, retracted=0, pages_active=active, pages_cached=0, pages_free=self.info.kv_pages - active,
            prompt_tokens=self._prompt, cached_tokens=self._cached, computed_prompt_tokens=self._prompt - self._cached,
            generated_tokens=self._generated, retractions=0, aborted=self._aborted, failed=0, finished=self._finished, evicted_pages=0, steps=self._steps,
            sessions=len(self.sessions), retained_pages=sum(self.sessions.values()),
        )  # fmt: skip

    async def _listen(self) -> None:
        while True:
            frame = await self._pull.recv()
            while not self.answering:
                await asyncio.sleep(0.01)
            message = decode_to_engine(frame)
            if isinstance(message, GenerateRequest):
                self.requests.append(message)
                prompt = array("i", message.tokens)
                self._prompt += len(prompt)
                reply = self.script(message)
                self._cached += reply.cached
                self.running[message.rid] = _Run(message, reply, prompt=prompt)
                self._work.set()
            elif isinstance(message, AbortRequest):
                self.aborts.append(message.rid)
                await self._abort(message.rid)
            elif isinstance(message, StopRequest):
                self.stops.append(message.rid)
                if message.rid in self.running:
                    self.running[message.rid].stopped = True
                    self._work.set()
            else:
                await self._answer(message)

    async def _answer(self, message: ControlRequest) -> None:
        self.control.append(message.method)
        if message.method in ("prefetch_session", "release_session"):
            await self.send(self._answer_session(message))
            return
        result: Any = self.stats() if message.method == "stats" else None
        await self.send(
            ControlReply(message.id, message.method in ("stats", "flush_cache", "shutdown", "info"), result)
        )

    def _answer_session(self, message: ControlRequest) -> ControlReply:
        pages = self.sessions.get(message.session, -1)
        if message.method == "release_session":
            self.sessions.pop(message.session, None)
        return ControlReply(message.id, pages >= 0, pages if pages >= 0 else "the session is not known")

    async def _abort(self, rid: int) -> None:
        run = self.running.pop(rid, None)
        if run is not None:
            self._aborted += 1
            item = TokenOutput(rid, [], "abort", stats=self._request_stats(run))
            await self.send(Outputs([item], self.stats()))

    async def _steps_loop(self) -> None:
        while True:
            if not self.running or not self.answering:
                self._work.clear()
                await asyncio.wait_for(self._work.wait(), None) if self.answering else await asyncio.sleep(0.01)
            await asyncio.sleep(self.step_s)
            if not self.answering:
                continue
            self._steps += 1
            items = [item for run in list(self.running.values()) if (item := self._step(run)) is not None]
            if items:
                await self.send(Outputs(items, self.stats()))
            elif self.running:
                await asyncio.sleep(0.005)

    def _step(self, run: _Run) -> TokenOutput | None:
        reply, params, rid = run.reply, run.request.params, run.request.rid
        cached = reply.cached if run.sent == 0 else -1
        if reply.error and run.sent >= len(reply.tokens):
            stats = self._request_stats(run) if run.sent else None
            error, param, status = reply.error, reply.param, reply.status
            last = TokenOutput(rid, [], "error", stats=stats, error=error, param=param, status=status)
            return self._end(run, last)
        if run.stopped:
            return self._end(run, TokenOutput(rid, [], "stop", stats=self._request_stats(run)))
        limit = min(len(reply.tokens), params.max_new_tokens)
        tokens = list(reply.tokens[run.sent : min(run.sent + reply.chunk, limit)])
        if not tokens and (reply.finish is None or limit):
            return None
        logprobs = (
            [self._logprobs(run, run.sent + i, token) for i, token in enumerate(tokens)]
            if params.logprobs >= 0
            else None
        )
        prompt_logprobs = self._prompt_logprobs(run) if run.sent == 0 and params.prompt_logprobs >= 0 else None
        run.sent += len(tokens)
        self._generated += len(tokens)
        finish, stop_reason = "", None
        if run.sent >= limit:
            cut = len(reply.tokens) > params.max_new_tokens
            finish = "length" if cut else "" if reply.error else reply.finish or ""
            stop_reason = reply.stop_reason if finish == "stop" else None
        stats = self._request_stats(run) if finish else None
        item = TokenOutput(rid, tokens, finish, stop_reason, cached, logprobs, prompt_logprobs, stats)
        return self._end(run, item) if finish else item

    def _end(self, run: _Run, item: TokenOutput) -> TokenOutput:
        self._finished += 1
        if run.request.session >= 0:
            self.sessions.pop(run.request.session, None)
            if run.request.retain_us and item.finish != "error":
                self.sessions[run.request.session] = len(run.prompt)
        self.running.pop(run.request.rid, None)
        return item

    def _logprobs(self, run: _Run, at: int, token: int) -> TokenLogprobs:
        ids = list(run.reply.alternatives[at] if at < len(run.reply.alternatives) else [token])[
            : run.request.params.logprobs
        ]
        return TokenLogprobs(-0.5 - at, 1, ids, [-0.5 - at - i for i in range(len(ids))])

    def _prompt_logprobs(self, run: _Run) -> list[TokenLogprobs | None]:
        top = run.request.params.prompt_logprobs
        return [
            None,
            *(TokenLogprobs(-1.0 - at, 1, [token][:top], [-1.0 - at][:top]) for at, token in enumerate(run.prompt[1:])),
        ]

    @staticmethod
    def _request_stats(run: _Run) -> RequestStats:
        return RequestStats(len(run.prompt), run.reply.cached, run.sent, 0.1, 1.0, 1.5, 3.0, 0, 0.0, 100.0)

"""Drives a workload against a server: arrivals, concurrency, warm-up, one record a request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenspeed.benchmark.records import Record
from tokenspeed.benchmark.wire import SseDecoder, Target, WireError, exchange
from tokenspeed.benchmark.workload import Session

__all__ = ["RunConfig", "Runner", "first_model"]

_CHAT = "chat"
_PATHS = {_CHAT: "/v1/chat/completions", "completions": "/v1/completions", "generate": "/generate"}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How requests are sent.

    Attributes:
        endpoint: ``chat``, ``completions``, or ``generate``, which sends ids: the texts' words are their numbers.
        max_concurrency: requests in flight at most.
        request_rate: sessions begun per second, Poisson arrivals; 0 begins each as soon as ``max_concurrency`` allows.
        warmup: requests sent before the clock starts; they are not counted.
        extra_body: merged into each request's JSON.
    """

    target: Target
    model: str
    endpoint: str
    output_len: int
    max_concurrency: int
    request_rate: float = 0.0
    temperature: float = 0.0
    ignore_eos: bool = True
    warmup: int = 0
    timeout_s: float = 900.0
    seed: int = 0
    extra_body: Mapping[str, Any] = field(default_factory=dict)


class Runner:
    """One run. ``on_request`` is called after every counted request, for a progress display."""

    def __init__(self, config: RunConfig, on_request: Callable[[Record], None] = lambda _record: None) -> None:
        self.config = config
        self._on_request = on_request
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._path = _PATHS[config.endpoint]

    async def warm_up(self, session: Session) -> list[Record]:
        """Send ``config.warmup`` requests that share no text with the run, so that the cache stays cold for it. ``session`` gives the text."""
        alone = Session(index=-1, system="", turns=session.turns[:1], pauses_s=(0.0,))
        return [await self._request(alone, 0, []) for _ in range(self.config.warmup)]

    async def run(self, sessions: list[Session]) -> tuple[list[Record], float]:
        """All sessions to their end; returns the records in order of completion and the wall time in seconds."""
        rng = random.Random(self.config.seed + 1)
        records: list[Record] = []
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(self._session(session, records))
                if self.config.request_rate > 0:
                    await asyncio.sleep(rng.expovariate(self.config.request_rate))
        return records, time.perf_counter() - begin

    async def _session(self, session: Session, records: list[Record]) -> None:
        history: list[dict[str, str]] = []
        for turn, pause_s in enumerate(session.pauses_s):
            if pause_s:
                await asyncio.sleep(pause_s)
            async with self._slots:
                record = await self._request(session, turn, history)
            records.append(record)
            self._on_request(record)
            if not record.ok:
                return  # later turns would build on an answer that never came
            history.append({"role": "user", "content": session.turns[turn]})
            history.append({"role": "assistant", "content": "".join(record.text)})

    def _body(self, session: Session, turn: int, history: list[dict[str, str]]) -> bytes:
        config = self.config
        texts = [session.system, *(message["content"] for message in history), session.turns[turn]]
        if config.endpoint == "generate":
            sampling = {
                "max_new_tokens": config.output_len,
                "temperature": config.temperature,
                "ignore_eos": config.ignore_eos,
            }
            ids = [int(word) for text in texts for word in text.split()]
            native: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling, "stream": True}
            return msgspec.json.encode(native | dict(config.extra_body))
        body: dict[str, Any] = {
            "model": config.model,
            "max_tokens": config.output_len,
            "temperature": config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if config.ignore_eos:
            body["ignore_eos"] = True
        if config.endpoint == _CHAT:
            system = [{"role": "system", "content": session.system}] if session.system else []
            body["messages"] = [*system, *history, {"role": "user", "content": session.turns[turn]}]
        else:
            body["prompt"] = " ".join(text for text in texts if text)
        return msgspec.json.encode(body | dict(config.extra_body))

    async def _request(self, session: Session, turn: int, history: list[dict[str, str]]) -> Record:
        payload = self._body(session, turn, history)
        events = SseDecoder()
        refusal = bytearray()
        record = Record(start=time.perf_counter(), session=session.index, turn=turn)

        def on_body(status: int, data: bytes, now: float) -> None:
            if status != 200:
                refusal.extend(data)
                record.error = f"HTTP {status}: {bytes(refusal[:300]).decode(errors='replace')}"
                return
            for event in events.feed(data):
                if event != b"[DONE]":
                    _take_event(record, msgspec.json.decode(event), now)

        try:
            await exchange(self.config.target, "POST", self._path, payload, on_body, self.config.timeout_s)
        except (WireError, OSError, msgspec.DecodeError) as error:
            record.error = str(error) or type(error).__name__
        if record.error is None and record.first is None:
            record.error = "the answer held no text"
        return record


def _take_event(record: Record, event: dict[str, Any], now: float) -> None:
    if event.get("error"):
        record.error = str(event["error"])[:300]
    if "output_ids" in event:  # the native route
        meta = event["meta_info"]
        record.prompt_tokens, record.completion_tokens = meta["prompt_tokens"], meta["completion_tokens"]
        record.cached_tokens = meta["cached_tokens"]
        record.finish = (meta["finish_reason"] or {}).get("type", record.finish)
        if event["output_ids"]:
            record.add_text(" ".join(map(str, event["output_ids"])), now)
        return
    usage = event.get("usage")
    if usage:
        record.prompt_tokens = usage.get("prompt_tokens", record.prompt_tokens)
        record.completion_tokens = usage.get("completion_tokens", record.completion_tokens)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        record.cached_tokens = record.cached_tokens if cached is None else cached
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        record.finish = choice.get("finish_reason") or record.finish
        if text:
            record.add_text(text, now)


async def first_model(target: Target, timeout_s: float) -> str:
    """The first model that the server lists. Raises ``WireError`` when it lists none or does not answer as an OpenAI-compatible server."""
    answer = bytearray()
    statuses: list[int] = []

    def on_body(status: int, data: bytes, _now: float) -> None:
        statuses.append(status)
        answer.extend(data)

    await exchange(target, "GET", "/v1/models", b"", on_body, timeout_s)
    try:
        return str(msgspec.json.decode(bytes(answer))["data"][0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        status = statuses[-1] if statuses else "no body"
        cure = "give the server's key with --api-key" if status == 401 else "name one with --model"
        told = bytes(answer[:200]).decode(errors="replace")
        raise WireError(f"/v1/models did not list a model (HTTP {status}: {told}); {cure}") from None

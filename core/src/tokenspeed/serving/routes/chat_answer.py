"""The answer of a chat completion: one JSON body, or chunks.

Finish reasons, the same in both forms: ``stop`` (end token, stop token or stop string), ``tool_calls`` (the same, after at least one finished call, unless
``tool_choice`` named the function), ``length``, ``abort`` (asked for on the control port). A call that was cut by ``length`` has unfinished arguments.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.serving.choice_text import ChoiceText, Told
from tokenspeed.serving.context import ServerContext
from tokenspeed.serving.generation import Delta, Generation, GenerationRequest
from tokenspeed.serving.protocol.answers import chat_logprobs, raise_failed, usage
from tokenspeed.serving.protocol.chat import ChatRequest
from tokenspeed.serving.protocol.sampling import StreamOptions
from tokenspeed.serving.sse import DONE, event, event_stream, to_json

__all__ = ["ChatJob", "stream_chat", "whole_chat"]


@dataclass
class ChatJob:
    """A checked request on its way; ``texts`` holds the text of each choice, ``named`` says that ``tool_choice`` names a function.

    ``looks_for_calls`` says that tools may be called: its session is kept after an answer that does.
    """

    context: ServerContext
    body: ChatRequest
    options: StreamOptions
    request: GenerationRequest
    model: str
    texts: list[ChoiceText]
    named: bool = False
    looks_for_calls: bool = False

    def ended(self, delta: Delta) -> None:
        """The last piece of a choice was read: a session whose answer calls no tool waits for none, and its pages are given back.

        What was aborted or failed is no answer: the pages that were kept before it stay.
        """
        called = delta.finish == "stop" and self.texts[delta.choice.index].called
        answered = delta.finish in ("stop", "length")
        if self.looks_for_calls and self.request.session.retain_us and answered and not called:
            self.context.llm.release_session(self.request.session)

    def finish_reason(self, delta: Delta) -> str:
        """``tool_calls`` where the model ended by itself and finished a call, unless the request named the function: it knows. A cut or abort keeps its
        own name."""
        called = delta.finish == "stop" and not self.named and self.texts[delta.choice.index].called
        return "tool_calls" if called else delta.finish

    def logprobs(self, entries: list[Any]) -> dict[str, Any]:
        """The chat shape of log probabilities."""
        return chat_logprobs(self.context.llm.tokenizer, entries, self.body.top_logprobs or 0)


async def whole_chat(job: ChatJob, generation: Generation) -> dict[str, Any]:
    """The whole answer.

    Raises:
        EngineError: a choice failed in the engine, or the engine is gone.
    """
    contents: list[list[str]] = [[] for _ in generation.choices]
    entries: list[list[Any]] = [[] for _ in generation.choices]
    ends: dict[int, Delta] = {}
    while (deltas := await generation.next()) is not None:
        for delta in deltas:
            raise_failed(delta)
            at = delta.choice.index
            contents[at].append(job.texts[at].feed(delta.text, spans=delta.spans, last=bool(delta.finish)).content)
            entries[at].extend(delta.entries or ())
            if delta.finish:
                ends[at] = delta
                job.ended(delta)
    return {
        "id": job.request.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": job.model,
        "choices": [_choice(job, at, "".join(contents[at]), entries[at], end) for at, end in sorted(ends.items())],
        "usage": usage(generation.choices, job.body.n),
    }


def _choice(job: ChatJob, at: int, content: str, entries: list[Any], end: Delta) -> dict[str, Any]:
    text = job.texts[at]
    calls, reasoning = text.message_calls(), text.reasoning
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
    }
    if reasoning:
        message |= _both_names(reasoning)
    if calls:
        message["tool_calls"] = calls
    return {
        "index": at,
        "message": message,
        "logprobs": job.logprobs(entries) if job.body.logprobs else None,
        "finish_reason": job.finish_reason(end),
        "stop_reason": end.stop_reason,
    }


def stream_chat(job: ChatJob, generation: Generation) -> AsyncGenerator[bytes, None]:
    """The chunks; their fixed parts are encoded once."""
    head = {
        "id": job.request.request_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": job.model,
    }
    opening = b"data: " + to_json(head)[:-1] + b',"choices":[{"index":'
    heads = [opening + b"%d" % at + b',"delta":' for at in range(len(generation.choices))]
    begun: set[int] = set()
    plain_tail = b',"usage":null}\n\n' if job.options.shows_usage else b"}\n\n"

    def chunks(delta: Delta) -> Sequence[bytes]:
        out: list[bytes] = []
        at, tail = delta.choice.index, plain_tail
        if job.options.continuous_usage_stats:
            tail = b',"usage":' + to_json(usage(generation.choices, job.body.n, running=True)) + b"}\n\n"
        if at not in begun:
            begun.add(at)
            role = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            out += (heads[at], role, tail)
        shown = job.texts[at].feed(delta.text, spans=delta.spans, last=bool(delta.finish))
        if not (shown.content or shown.calls or shown.reasoning or delta.entries or delta.finish):
            return out
        logprobs = to_json(job.logprobs(delta.entries)) if delta.entries else b"null"
        out += (heads[at], _delta(shown, last=bool(delta.finish)), b',"logprobs":', logprobs, b',"finish_reason":')
        if delta.finish:
            job.ended(delta)
            out += (to_json(job.finish_reason(delta)), b',"stop_reason":', to_json(delta.stop_reason), b"}]", tail)
        else:
            out += (b"null}]", tail)
        return out

    def last() -> bytes:
        totals = {**head, "choices": [], "usage": usage(generation.choices, job.body.n)}
        return (event(totals) if job.options.include_usage else b"") + DONE

    return event_stream(generation, chunks, last)


def _delta(told: Told, *, last: bool) -> bytes:
    if not told.calls and not told.reasoning:
        return b"{}" if last and not told.content else b'{"content":' + to_json(told.content) + b"}"
    shown: dict[str, Any] = {"content": told.content} if told.content else {}
    if told.reasoning:
        shown |= _both_names(told.reasoning)
    if told.calls:
        shown["tool_calls"] = told.calls
    return to_json(shown)


def _both_names(reasoning: str) -> dict[str, str]:
    """Clients read one or the other."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}

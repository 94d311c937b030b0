"""Streams as the tests read them: every event, and how the stream ended."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

__all__ = ["Stream", "open_stream", "read_streams"]


@dataclass
class Stream:
    """One streamed completion. ``error`` is the error event's or the connection's text; ``done`` means that ``[DONE]`` came."""

    status: int = 0
    texts: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: str = ""
    done: bool = False
    started_s: float = 0.0
    ended_s: float = 0.0
    first: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def take(self, line: str) -> None:
        """One line of the event stream."""
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if event.get("error"):
            self.error = str(event["error"])
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text:
                self.texts.append(text)
                self.times_s.append(time.monotonic())
                self.first.set()
            self.finish = choice.get("finish_reason") or self.finish


async def open_stream(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], stream: Stream | None = None
) -> Stream:
    """Send a streamed completion and read it to its end, however it ends."""
    stream = stream or Stream()
    stream.started_s = time.monotonic()
    body = {"stream": True, "stream_options": {"include_usage": True}, **body}
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            stream.status = response.status_code
            if response.status_code != 200:
                stream.error = (await response.aread()).decode()
            else:
                async for line in response.aiter_lines():
                    stream.take(line)
    except httpx.TransportError as error:
        stream.error = stream.error or repr(error)
    finally:
        stream.ended_s = time.monotonic()
        stream.first.set()
    return stream


async def read_streams(url: str, bodies: list[dict[str, Any]], at_once: int | None = None) -> list[Stream]:
    """All of ``bodies`` at once, or at most ``at_once`` of them; in order."""
    gate = asyncio.Semaphore(at_once or len(bodies))

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> Stream:
        async with gate:
            return await open_stream(client, url, body)

    limits = httpx.Limits(max_connections=len(bodies), max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=300, limits=limits, trust_env=False) as client:
        return list(await asyncio.gather(*(one(client, body) for body in bodies)))

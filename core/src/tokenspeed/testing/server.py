"""A whole server on free ports in the caller's event loop, with a scripted engine behind real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import msgspec
import uvicorn

from tokenspeed.config import ServingConfig
from tokenspeed.interfaces.parser import ToolParser
from tokenspeed.interfaces.reasoning import ReasoningParser
from tokenspeed.messages import GenerateRequest
from tokenspeed.serving.app import build_app, build_control_app
from tokenspeed.serving.async_llm import AsyncLLM
from tokenspeed.serving.constraint import GrammarChecker, NoBackend
from tokenspeed.serving.context import ServerContext
from tokenspeed.serving.engine_client import EngineClient
from tokenspeed.serving.http_protocol import BoundedHttpProtocol
from tokenspeed.serving.sockets import Sockets, bind_sockets
from tokenspeed.serving.tokenizer import Tokenizer
from tokenspeed.testing.byte_tokenizer import ByteTokenizer
from tokenspeed.testing.fake_engine import FakeEngine, Reply

__all__ = ["MODEL", "Running", "events", "running", "streamed_text", "text_reply", "until"]

#: Name of the served model.
MODEL = "fake/model"


class Running:
    """A server under test.

    Attributes:
        engine: the scripted engine. context: what the routes share.
        http, control: clients of the two ports; they send the first API key where there is one.
    """

    def __init__(
        self,
        engine: FakeEngine,
        context: ServerContext,
        sockets: Sockets,
        http: httpx.AsyncClient,
        control: httpx.AsyncClient,
    ) -> None:
        self.engine = engine
        self.context = context
        self.llm = context.llm
        self.sockets = sockets
        self.http = http
        self.control = control

    async def chat(self, content: str = "hi", **fields: object) -> httpx.Response:
        """A chat completion of one user message."""
        return await self.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **fields}
        )

    async def complete(self, prompt: object = "hi", **fields: object) -> httpx.Response:
        """A text completion."""
        return await self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    async def metrics(self) -> str:
        """The text of ``/metrics``."""
        return (await self.http.get("/metrics")).text


def text_reply(text: str, **fields: object) -> Callable[[GenerateRequest], Reply]:
    """A script that says ``text``, a byte per token, and ends with the end token."""
    return lambda _: Reply(tokens=[*text.encode(), 256], **fields)  # type: ignore[arg-type]


def events(body: str | bytes) -> list[dict[str, Any]]:
    """The JSON bodies of a stream; checks that it ends with [DONE]."""
    text = body.decode() if isinstance(body, bytes) else body
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-3:]
    return [msgspec.json.decode(line) for line in lines[:-1]]


def streamed_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream of either route."""
    parts = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(parts)


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Until ``condition`` holds; fails the test after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def running(
    script: Callable[[GenerateRequest], Reply] | str = "hello",
    *,
    config: ServingConfig | None = None,
    tokenizer: Tokenizer | None = None,
    tool_parser: type[ToolParser] | None = None,
    reasoning_parser: type[ReasoningParser] | None = None,
    grammar_checker: GrammarChecker | NoBackend | None = None,
    step_s: float = 0.0,
    max_model_len: int = 512,
    ready: bool = True,
    hung_after_s: float = 5.0,
    heartbeat_s: float = 1.0,
    busy_limit_s: float = 60.0,
    pids: Sequence[int] = (),
) -> AsyncIterator[Running]:
    """Serve on free ports while the block runs.

    Args:
        script: what requests get, or a text that all get. step_s: pause between the engine's steps.
        tool_parser, reasoning_parser: classes of parsers. grammar_checker: of a grammar backend. ready: whether the engine says so at once.
        hung_after_s, heartbeat_s, busy_limit_s: the watch over the engine. pids: processes whose work counts as the engine's.
    """
    tokenizer = tokenizer or ByteTokenizer()
    engine = FakeEngine(text_reply(script) if isinstance(script, str) else script, step_s=step_s)
    engine.info = msgspec.structs.replace(engine.info, max_model_len=max_model_len, vocab_size=tokenizer.vocab_size)
    await engine.start(ready=ready)
    client = EngineClient(
        engine.to_engine,
        engine.from_engine,
        hung_after_s=hung_after_s,
        heartbeat_s=heartbeat_s,
        busy_limit_s=busy_limit_s,
        pids=pids,
    )
    llm = AsyncLLM(client, tokenizer)
    config = config or ServingConfig(port=0)
    context = ServerContext(
        llm=llm,
        config=config,
        model_names=(MODEL,),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        grammar_checker=grammar_checker,
    )
    sockets = bind_sockets(config)
    servers = [
        _Server(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        for app in (build_app(context), build_control_app(context))
    ]
    tasks = [
        asyncio.create_task(s.serve([bound])) for s, bound in zip(servers, (sockets.api, sockets.control), strict=True)
    ]
    llm.start()
    try:
        while not all(server.started for server in servers):
            await asyncio.sleep(0.005)
        if ready:
            await asyncio.wait_for(client.settled.wait(), 30)
        headers = {"authorization": f"Bearer {config.api_key[0]}"} if config.api_key else {}
        async with (
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{sockets.port}", headers=headers, timeout=20, verify=False
            ) as http,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{sockets.control_port}", headers=headers, timeout=20, verify=False
            ) as control,
        ):
            yield Running(engine, context, sockets, http, control)
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)
        llm.close()
        await engine.close()


class _Server(uvicorn.Server):
    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)

"""The life of the server process: bind, serve 503 until the engine is ready, serve, drain, end.

1. ``sockets.bind_sockets`` takes both ports before anything expensive happens.
2. ``Server.run`` answers at once (503) and waits for the engine's first word.
3. SIGTERM or SIGINT drains: ``/health`` turns red, new requests get 503 with Retry-After, running ones finish within ``drain_timeout_s``; what is left then
   ends with an error. Further signals change nothing, except a SIGINT, which ends at once.
4. A dead engine ends every stream with an error and the process with a code that is not zero, after a moment in which probes can see the 503.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from litestar.types import ASGIApp

from tokenspeed.errors import EngineError
from tokenspeed.serving.app import build_app, build_control_app
from tokenspeed.serving.context import ServerContext
from tokenspeed.serving.http_protocol import BoundedHttpProtocol
from tokenspeed.serving.sockets import BACKLOG, Sockets

__all__ = ["run_server"]

_log = logging.getLogger(__name__)

#: How long a server whose engine died goes on answering 503.
_LAST_WORDS_S = 2.5
_FLUSH_S = 1.0
_FILES = 65536


def run_server(context: ServerContext, sockets: Sockets, *, on_ready: Callable[[], None] | None = None) -> int:
    """Serve until a signal or the engine's end; returns the exit code. Signals stay ignored afterwards: what follows is clean-up.

    Args:
        context: with an ``AsyncLLM`` whose client is not started.
        sockets: both ports, bound.
        on_ready: called once when the engine is ready.
    """
    import uvloop

    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Server(context, sockets, on_ready).run())


def _raise_file_limit() -> None:
    """A connection takes a file descriptor, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)


class _Server:
    def __init__(self, context: ServerContext, sockets: Sockets, on_ready: Callable[[], None] | None) -> None:
        self._context = context
        self._sockets = sockets
        self._on_ready = on_ready
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._signals = 0

    async def run(self) -> int:
        llm = self._context.llm
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal, number)
        died = asyncio.Event()
        llm.on_death = lambda _: died.set()
        llm.start()
        servers = [
            self._uvicorn(build_app(self._context)),
            self._uvicorn(build_control_app(self._context)),
        ]
        tasks = [
            asyncio.create_task(server.serve([bound]))
            for server, bound in zip(servers, (self._sockets.api, self._sockets.control), strict=True)
        ]
        ready = asyncio.create_task(self._announce())
        try:
            await _first(self._stop.wait(), died.wait(), *(asyncio.shield(task) for task in tasks))
            code = await self._drain(died) if not died.is_set() and self._stop.is_set() else 1
            if died.is_set():
                code = await self._mourn()
        finally:
            ready.cancel()
            self._context.draining = True
            for server in servers:
                server.should_exit = True
                server.force_exit = self._force.is_set()
            await asyncio.wait(tasks, timeout=_FLUSH_S + 2)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)
            llm.close()
        return 130 if self._force.is_set() else code

    def _uvicorn(self, app: ASGIApp) -> _Uvicorn:
        options: dict[str, Any] = {
            "http": BoundedHttpProtocol,
            "ws": "none",
            "lifespan": "off",
            "access_log": False,
            "log_config": None,
            "log_level": self._context.config.uvicorn_log_level,
            "server_header": False,
            "timeout_graceful_shutdown": _FLUSH_S,
            "timeout_keep_alive": 75,
            "backlog": BACKLOG,
        }
        return _Uvicorn(uvicorn.Config(app, **options))

    async def _announce(self) -> None:
        await self._context.llm.client.settled.wait()
        if self._context.llm.client.ready:
            gc.collect()
            gc.freeze()  # what start-up made lives on: collections need not look at it again
            if self._on_ready is not None:
                self._on_ready()

    def _signal(self, number: signal.Signals) -> None:
        if number is signal.SIGINT and self._stop.is_set():
            self._signals += 1
            self._force.set()
        self._context.draining = True
        self._stop.set()

    async def _drain(self, died: asyncio.Event) -> int:
        """Wait for running requests, then end the engine in good order."""
        context, llm = self._context, self._context.llm
        _log.info("Draining: %d requests run; waiting up to %g s", llm.live_requests, context.config.drain_timeout_s)
        await _first(self._idle(), died.wait(), self._force.wait(), timeout=context.config.drain_timeout_s)
        if died.is_set():
            return 1
        if llm.live_requests:
            _log.warning("%d requests did not finish in time: they end with an error", llm.live_requests)
            llm.fail_all(EngineError("the server is shutting down"), "shutdown")
        if not self._force.is_set():
            await _first(self._idle(), self._force.wait(), timeout=_FLUSH_S)
        llm.client.expect_end()
        return 0

    async def _idle(self) -> None:
        """Until every answer has been sent."""
        while self._context.http_requests:
            await asyncio.sleep(0.02)

    async def _mourn(self) -> int:
        client = self._context.llm.client
        _log.error("%s: the server ends", client.failure)
        if client.info is None:  # it never served: nobody waits for a last answer
            return 1
        await _first(self._force.wait(), timeout=_LAST_WORDS_S)
        return 1


async def _first(*waits: Any, timeout: float | None = None) -> None:
    """Until one of ``waits`` is done or time is up; the rest are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()

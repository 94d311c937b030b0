"""The server's end of the sockets to the engine, and the watch over the engine's life.

Frames are read as the sockets become readable, without a task of their own: one wake-up serves every request of a step. Death is seen through the processes'
sentinels (readable when a process has ended); a hang through a heartbeat, a control request that must be answered in time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from tokenspeed.errors import EngineError
from tokenspeed.messages import (
    ControlReply,
    ControlRequest,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineStats,
    Outputs,
    ToEngine,
    decode_from_engine,
    encode,
)
from tokenspeed.serving.activity import ProcessActivity

__all__ = ["EngineClient"]

_log = logging.getLogger(__name__)

_MAX_FRAME_BYTES = 256 * 1024 * 1024
_FRAMES_PER_WAKEUP = 64
_LAST_WORDS_TRIES = 6
_LAST_WORDS_PAUSE_S = 0.05


class EngineClient:
    """Connects to an engine that is starting or running.

    Args:
        to_engine: address of the engine's PULL socket (``ipc://`` in a private directory).
        from_engine: address of the engine's PUSH socket.
        sentinels: file descriptors that become readable when an engine process has ended.
        heartbeat_s: how often an engine that says nothing is asked for a sign of life.
        hung_after_s: silence after which an engine that uses no CPU time counts as hung (it may recover).
        busy_limit_s: the same for one that does use CPU time: a single step may be long.
        give_up_after_s: an engine that neither speaks nor uses CPU time for this long is given up: open requests fail as if it had died. Only time in
            which the watch itself ran counts, so that a machine which stands still as a whole is no reason.
        pids: the engine's processes, for telling the two apart.
        last_words: tells how a process ended, where that is known; asked when a sentinel becomes readable.
    """

    def __init__(
        self,
        to_engine: str,
        from_engine: str,
        sentinels: Sequence[int] = (),
        *,
        heartbeat_s: float = 1.0,
        hung_after_s: float = 5.0,
        busy_limit_s: float = 60.0,
        give_up_after_s: float = 30.0,
        pids: Sequence[int] = (),
        last_words: Callable[[], str] = str,
    ) -> None:
        self._addresses = (to_engine, from_engine)
        self._sentinels = tuple(sentinels)
        self._heartbeat_s = heartbeat_s
        self._hung_after_s = hung_after_s
        self._busy_limit_s = busy_limit_s
        self._give_up_after_s = give_up_after_s
        self._activity = ProcessActivity(pids)
        self._active_s = 0.0
        self._last_words = last_words
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._control: dict[int, asyncio.Future[ControlReply]] = {}
        self._control_ids = itertools.count(1)
        self._heard_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._on_outputs: Callable[[Outputs], None] = _ignore
        self._on_death: Callable[[EngineError], None] = _ignore
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.hung = False
        self.bad_frames = 0
        self.failure: EngineError | None = None
        #: set when the engine is ready or has failed.
        self.settled = asyncio.Event()

    @property
    def ready(self) -> bool:
        """The engine takes requests."""
        return self.info is not None and self.failure is None

    def start(self, on_outputs: Callable[[Outputs], None], on_death: Callable[[EngineError], None]) -> None:
        """Connect and begin to read; must be called in the running event loop."""
        self._on_outputs, self._on_death = on_outputs, on_death
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        for socket in (self._push, self._pull):
            socket.setsockopt(zmq.LINGER, 500 if socket is self._push else 0)  # ms; lets a last "shutdown" out
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        self._push.connect(self._addresses[0])
        self._pull.connect(self._addresses[1])
        self._descriptor = int(self._pull.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._read)
        for sentinel in self._sentinels:
            self._loop.add_reader(sentinel, self._process_ended)
        self._tasks = [asyncio.create_task(self._watch())]
        self._read()

    def close(self) -> None:
        """Disconnect; control requests that wait are cancelled."""
        if self._context is None:
            return
        for task in self._tasks:
            task.cancel()
        self._loop.remove_reader(self._descriptor)
        self._forget_sentinels()
        for future in self._control.values():
            future.cancel()
        self._push.close()
        self._pull.close()
        self._context.term()
        self._context = None

    def send(self, message: ToEngine) -> None:
        """Queue one message; never blocks. Dropped when the engine is gone: its requests have failed already."""
        if self.failure is None and self._context is not None:
            self._push.send(encode(message), zmq.NOBLOCK)

    def expect_end(self) -> None:
        """The server ends in good order: ask the engine to end too, and do not take its end for a death."""
        if self._context is None:
            return
        self._forget_sentinels()
        for task in self._tasks:
            task.cancel()
        self.send(ControlRequest(next(self._control_ids), "shutdown"))

    def tell(self, method: str, session: int = -1) -> None:
        """Ask for an operation and wait for no answer."""
        self.send(ControlRequest(next(self._control_ids), method, session))

    async def control(self, method: str, timeout_s: float = 5.0, *, session: int = -1) -> ControlReply:
        """Ask for an operation on the engine as a whole, or on a session.

        Raises:
            EngineError: no answer in time, or the engine is gone.
        """
        if self.failure is not None:
            raise self.failure
        number = next(self._control_ids)
        future = self._control[number] = asyncio.get_running_loop().create_future()
        self.send(ControlRequest(number, method, session))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise EngineError(f"the engine did not answer {method!r} within {timeout_s:g} s") from None
        finally:
            self._control.pop(number, None)

    def _read(self) -> None:
        if self._context is None:
            return
        for _ in range(_FRAMES_PER_WAKEUP):
            try:
                frame = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_s = self._loop.time()
            try:
                message = decode_from_engine(frame)
            except (msgspec.DecodeError, RecursionError):
                self.bad_frames += 1
                continue
            self._handle(message)
        self._loop.call_soon(
            self._read
        )  # the descriptor signals changes only: come back for the rest after the others had their turn

    def _handle(self, message: Outputs | EngineReady | EngineFailed | ControlReply) -> None:
        if isinstance(message, Outputs):
            if message.stats is not None:
                self.stats = message.stats
            self._on_outputs(message)
        elif isinstance(message, ControlReply):
            self._answered(message)
        elif isinstance(message, EngineReady):
            self.info = message.info
            self.settled.set()
        else:
            self._die(f"the engine failed: {message.error}")

    def _answered(self, reply: ControlReply) -> None:
        stats = _as_stats(reply.result)
        if stats is not None:
            self.stats = stats
        future = self._control.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    def _process_ended(self) -> None:
        self._forget_sentinels()
        self._tasks.append(asyncio.create_task(self._mourn()))

    async def _mourn(self) -> None:
        """A sentinel may be readable a moment before the process is through: wait a little for its last words."""
        for _ in range(_LAST_WORDS_TRIES):
            self._read()
            if self.failure is not None:
                return
            words = self._last_words()
            if words:
                break
            await asyncio.sleep(_LAST_WORDS_PAUSE_S)
        self._die(words or "an engine process ended unexpectedly")

    def _forget_sentinels(self) -> None:
        for sentinel in self._sentinels:
            self._loop.remove_reader(sentinel)
        self._sentinels = ()

    def _die(self, reason: str) -> None:
        self._forget_sentinels()
        if self.failure is not None:
            return
        self.failure = EngineError(reason)
        for future in self._control.values():
            if not future.done():
                future.set_exception(self.failure)
                future.exception()  # nobody may be waiting any more
        self.settled.set()
        self._on_death(self.failure)

    async def _watch(self) -> None:
        await self.settled.wait()
        # Only time in which this watch ran: a server that was stopped or starved says nothing about its engine.
        idle_s, silent_s, last = 0.0, 0.0, self._loop.time()
        while self.failure is None:
            await asyncio.sleep(self._heartbeat_s)
            self._read()  # in case a change of the descriptor went unseen
            now = self._loop.time()
            silence = now - self._heard_s
            if self._activity.progressed():
                self._active_s = now
            alive = max(self._heard_s, self._active_s)
            passed = min(now - last, 2 * self._heartbeat_s)
            idle_s = 0.0 if alive > last else idle_s + passed
            silent_s = 0.0 if self._heard_s > last else silent_s + passed
            last = now
            self._judge(silent_s, idle_s)
            if idle_s >= self._give_up_after_s:
                self._die(f"the engine hangs: no answer and no CPU time used for {idle_s:.0f} s")
            elif silence >= self._heartbeat_s * 0.9:
                self.send(ControlRequest(next(self._control_ids), "stats"))

    def _judge(self, silence: float, idle: float) -> None:
        """Set ``hung`` by how long nothing was heard and how long the processes have done nothing."""
        hung = idle >= self._hung_after_s or silence >= self._busy_limit_s
        if hung and not self.hung:
            _log.error("The engine has not answered for %.1f s: it hangs; /health answers 503 until it does", silence)
        if self.hung and not hung:
            _log.warning("The engine is well again: it answers or is at work")
        self.hung = hung


def _as_stats(result: Any) -> EngineStats | None:
    try:
        return msgspec.convert(result, EngineStats)
    except msgspec.ValidationError:
        return None


def _ignore(_: Any) -> None:
    return None

"""Several ranks, one scheduler: rank 0 sends each plan's arrays to the others, and all of them execute it.

A plan travels as one frame over a socket per rank, so a rank that has nothing to do sleeps in its socket, without a collective that would time out or spin.
Every rank draws the same tokens from the same gathered logits and the same counters, so nothing comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import zmq

from tokenspeed.engine.rank_caches import Answers
from tokenspeed.errors import EngineError
from tokenspeed.runtime.cache_executor import CacheExecutor
from tokenspeed.runtime.cache_ops import CacheOps
from tokenspeed.runtime.executor import ModelExecutor
from tokenspeed.runtime.plan import PlanArrays, PlanView, SlotRequest
from tokenspeed.runtime.results import PendingStep

__all__ = ["FollowerLoop", "LeaderExecutor", "PlanSender", "pack_plan", "unpack_plan"]

_FIELDS = (
    "slots",
    "context_lens",
    "query_lens",
    "input_ids",
    "flags",
    "output_lens",
    "delta_group",
    "delta_slot",
    "delta_index",
    "delta_page",
    "state_kind",
    "state_group",
    "state_source",
    "state_target",
    "prefix_intervals",
)


class _PlanFrame(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """``sizes`` are the fields' lengths in int32; ``arrays`` their contents one after another. ``cache`` holds the arrays of cache operations, if any."""

    num_rows: int
    num_extend_rows: int
    num_tokens: int
    sizes: list[int]
    arrays: bytes
    new: list[SlotRequest]
    cache: list[bytes] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_PlanFrame)
#: The frame that ends the ranks.
_END = b""


def pack_plan(plan: PlanView, new: Sequence[SlotRequest], cache_ops: CacheOps | None = None) -> bytes:
    """The frame of a plan and its cache operations."""
    arrays = [np.ascontiguousarray(getattr(plan, name), dtype=np.int32).reshape(-1) for name in _FIELDS]
    frame = _PlanFrame(
        plan.num_rows,
        plan.num_extend_rows,
        plan.num_tokens,
        [a.size for a in arrays],
        np.concatenate(arrays).tobytes(),
        list(new),
        [] if cache_ops is None else cache_ops.pack(),
    )
    return _encoder.encode(frame)


def unpack_plan(frame: bytes) -> tuple[PlanArrays, list[SlotRequest]] | None:
    """What ``pack_plan`` packed; ``None`` for the end."""
    if frame == _END:
        return None
    parts = _decoder.decode(frame)
    flat = np.frombuffer(parts.arrays, dtype=np.int32)
    arrays = dict(zip(_FIELDS, np.split(flat, np.cumsum(parts.sizes)[:-1]), strict=True))
    arrays["prefix_intervals"] = arrays["prefix_intervals"].reshape(-1, 4)
    plan = PlanArrays(
        num_rows=parts.num_rows,
        num_extend_rows=parts.num_extend_rows,
        num_tokens=parts.num_tokens,
        cache_ops=CacheOps.unpack(parts.cache) if parts.cache else None,
        **arrays,
    )
    return plan, parts.new


class PlanSender:
    """Rank 0's sockets to the other ranks; ``addresses`` has one for each."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = []
        for address in addresses:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.bind(address)
            self._sockets.append(socket)

    def send(self, frame: bytes) -> None:
        """Send ``frame`` to every other rank."""
        for socket in self._sockets:
            socket.send(frame)

    def close(self) -> None:
        """Tell the other ranks that the engine ends, and close."""
        self.send(_END)
        for socket in self._sockets:
            socket.close(1000)
        self._context.term()


class LeaderExecutor:
    """Executes plans on rank 0 and makes the other ranks do the same; ``tiers`` where plans carry cache operations."""

    def __init__(self, executor: ModelExecutor, sender: PlanSender, *, tiers: bool = False) -> None:
        self._executor = executor
        self._sender = sender
        self._tiers = tiers

    def execute(self, plan: PlanView, new: Sequence[SlotRequest] = ()) -> PendingStep:
        """See ``ModelExecutor.execute``."""
        self._sender.send(pack_plan(plan, new, CacheOps.of(plan) if self._tiers else None))
        return self._executor.execute(plan, new)


class FollowerLoop:
    """The loop of every rank but the first. It ends with the frame that says so; that rank 0 is gone is noticed by ``Lifeline``.

    Args:
        cache: the rank's tiers, whose answers go to ``answers``, an address of rank 0.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        address: str,
        *,
        on_end: Callable[[], None],
        cache: CacheExecutor | None = None,
        answers: str = "",
    ) -> None:
        self._executor = executor
        self._cache = cache
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._on_end = on_end
        self._answers = Answers(self._context, answers) if cache is not None else None

    def run(self) -> None:
        """Execute plans until the end.

        Raises:
            EngineError: a frame does not hold a plan; the ranks would drift apart.
        """
        try:
            while (step := self._receive()) is not None:
                self._executor.execute(*step)
            self._on_end()
        finally:
            if self._cache is not None and self._answers is not None:
                self._answers.close()
                self._cache.close()
            self._socket.close(0)
            self._context.term()

    def _receive(self) -> tuple[PlanArrays, list[SlotRequest]] | None:
        self._answer()
        while self._cache is not None and self._cache.in_flight and not self._socket.poll(1):
            self._answer()
        try:
            return unpack_plan(self._socket.recv())
        except msgspec.DecodeError as error:
            raise EngineError(f"rank 0 sent a frame that holds no plan: {error}") from error

    def _answer(self) -> None:
        """Tell rank 0 of cache operations that have ended here."""
        if self._cache is not None and self._answers is not None:
            self._answers.send(self._cache.finished())

"""The engine inside the calling process: offline use and tests. The same loop, stepped by the caller."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from tokenspeed.engine.assembly import Assembly
from tokenspeed.engine.build import build_loop, build_rank
from tokenspeed.engine.channel import LocalChannel
from tokenspeed.engine.event_loop import now_us
from tokenspeed.errors import ConfigError
from tokenspeed.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    GenerateRequest,
    Grammar,
    Outputs,
    SamplingParams,
    StopRequest,
    TokenOutput,
)

__all__ = ["LocalEngine"]


#: How long a step waits at most where there is nothing to do but to wait for a grammar.
_GRAMMAR_S = 0.02


class LocalEngine:
    """One rank, driven by ``step``. Not thread safe.

    Args:
        assembly: for one rank; several need processes of their own (``engine.launch``).
        clock: microseconds; another one than the system's makes plans repeatable.

    Raises:
        ConfigError: the assembly asks for several ranks.
    """

    def __init__(self, assembly: Assembly, *, clock: Callable[[], int] = now_us) -> None:
        if assembly.config.parallel.world_size > 1:
            raise ConfigError("an engine inside this process has one rank; leave out --tensor-parallel-size")
        self._channel = LocalChannel()
        self._loop, self.info = build_loop(assembly, build_rank(assembly), channel=self._channel, clock=clock)
        self._rids = itertools.count()
        self._kept: list[TokenOutput] = []

    def add_request(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: bytes = b"",
        grammar: Grammar | None = None,
        session: int = -1,
        retain_us: int = 0,
    ) -> int:
        """Queue a prompt; the number that its outputs carry. A prompt that cannot run ends with an error output."""
        rid = next(self._rids)
        packed = np.asarray(tokens, dtype="<i4").tobytes()
        self._channel.to_engine.append(
            GenerateRequest(rid, packed, params, 0.0, priority, salt, grammar, session, retain_us)
        )
        return rid

    def abort(self, rid: int) -> None:
        """End a request at once; an ``abort`` output follows if it was alive."""
        self._channel.to_engine.append(AbortRequest(rid))

    def stop(self, rid: int) -> None:
        """End a request in good order: a stop string matched."""
        self._channel.to_engine.append(StopRequest(rid))

    def control(self, method: str, session: int = -1) -> ControlReply:
        """Carry out a control operation now; outputs told meanwhile stay for the next ``step``. What concerns a session takes the steps in flight first."""
        self._channel.to_engine.append(ControlRequest(0, method, session))
        while self._channel.to_engine:  # a receive takes a bounded number; what stands before the question comes first
            self._loop.take(self._channel.receive(0))
        while (reply := next((m for m in self._channel.from_engine if isinstance(m, ControlReply)), None)) is None:
            self._loop.step()
        self._channel.from_engine.remove(reply)
        return reply

    def close(self) -> None:
        """End what the engine runs outside this process."""
        self._loop.close()

    @property
    def busy(self) -> bool:
        """Requests wait, run, or have outputs in flight."""
        return self._loop.busy or bool(self._channel.to_engine or self._channel.from_engine or self._kept)

    def step(self) -> list[TokenOutput]:
        """Take what was queued, run one step, and return what it told."""
        self._loop.take(self._channel.receive(0))
        if not self._loop.step():
            self._loop.wait_for_grammars(_GRAMMAR_S)
        messages = list(self._channel.from_engine)
        self._channel.from_engine.clear()
        kept, self._kept = self._kept, []
        return kept + [item for message in messages if isinstance(message, Outputs) for item in message.items]

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[TokenOutput]]:
        """Run prompts to their ends, all at once; each one's outputs in order. What other requests tell meanwhile is kept for the next ``step``."""
        rids = [self.add_request(prompt, params) for prompt in prompts]
        outputs: dict[int, list[TokenOutput]] = {rid: [] for rid in rids}
        others, self._kept = self._kept, []
        living = set(rids)
        while living:
            for item in self.step():
                if item.rid not in outputs:
                    others.append(item)
                    continue
                outputs[item.rid].append(item)
                if item.finish:
                    living.discard(item.rid)
        self._kept = others
        return [outputs[rid] for rid in rids]

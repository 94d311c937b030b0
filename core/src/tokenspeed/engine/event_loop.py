"""The engine's loop. One step, four verbs: plan, execute, advance, emit."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tokenspeed._scheduler import AdvanceResult, ExecutionPlan, Scheduler
from tokenspeed._scheduler import FinishReason as SchedulerReason
from tokenspeed.engine.channel import Channel
from tokenspeed.engine.control import Control
from tokenspeed.engine.gauges import Gauges
from tokenspeed.engine.grammars import Grammars
from tokenspeed.engine.kv_events.publisher import KVEventPublisher
from tokenspeed.engine.outputs import (
    OUTCOME_RELOAD,
    REASONS,
    Judgement,
    judge,
    output_of,
    take_prompt_logprobs,
    token_logprobs,
)
from tokenspeed.engine.rate_limit import RateLimitedLog
from tokenspeed.engine.requests import Admission, LiveRequest
from tokenspeed.engine.scheduling import REFUSED_PARAMS, request_spec
from tokenspeed.engine.sessions import SESSION_METHODS, SessionAsks
from tokenspeed.engine.tiers import Load, Tiers
from tokenspeed.errors import RequestError
from tokenspeed.messages import (
    AbortRequest,
    ControlRequest,
    GenerateRequest,
    Outputs,
    StopRequest,
    ToEngine,
    TokenLogprobs,
    TokenOutput,
)
from tokenspeed.runtime.plan import NEW_IN_SLOT, PlanView, SlotRequest
from tokenspeed.runtime.results import PendingStep, StepResult
from tokenspeed.types import FinishReason

__all__ = ["EventLoop", "Executor", "now_us"]

_log = logging.getLogger(__name__)

#: How long to wait for messages where requests wait and no plan can run; nothing in the engine itself would change that.
_STALLED_S = 0.01
#: The same where pages are on their way: a request may wait for them, and nobody wakes the loop when they are there.
_MOVING_S = 0.001


def now_us() -> int:
    """The engine's clock: microseconds, never backwards."""
    return time.monotonic_ns() // 1000


class Executor(Protocol):
    """What executes plans: the one rank's ``ModelExecutor``, or the leader of several ranks."""

    def execute(self, plan: PlanView, new: Sequence[SlotRequest] = ()) -> PendingStep:
        """Queue a plan; see ``ModelExecutor.execute``."""


@dataclass(slots=True)
class _Flight:
    """A plan that was queued and not advanced yet. ``ids`` are its rows' request ids: the plan's own arrays do not live as long.

    ``step_us`` is how long it took, 0 where that is known only when its result is there; it was queued at ``began_us``.
    """

    plan_id: int
    ids: list[int]
    step: PendingStep
    began_us: int
    step_us: int
    loads: tuple[Load, ...] = ()


class EventLoop:
    """Drives one scheduler and one executor.

    Args:
        grammars: where requests wait for their grammars; refuses them all unless given.
        tiers: told of cache operations; ``None`` without a host tier.
        overlap_depth: plans that may be executed before the results of the plan before them are advanced; 0 or 1.
        clock: microseconds; another one than ``now_us`` makes times repeatable.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        admission: Admission,
        channel: Channel,
        control: Control,
        gauges: Gauges,
        grammars: Grammars | None = None,
        tiers: Tiers | None = None,
        kv_events: KVEventPublisher | None = None,
        overlap_depth: int = 0,
        clock: Callable[[], int] = now_us,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._admission = admission
        self._channel = channel
        self._control = control
        self._gauges = gauges
        self._grammars = grammars or Grammars()
        self._tiers = tiers
        self._kv_events = kv_events
        self._depth = overlap_depth
        self._clock = clock
        self._flights: deque[_Flight] = deque()
        self._ended_us = 0
        self._by_id: dict[int, LiveRequest] = {}
        self._by_rid: dict[int, LiveRequest] = {}
        self._outbox: list[TokenOutput] = []
        self._unknown = RateLimitedLog(_log)
        self._sessions = SessionAsks(scheduler)

    def run(self) -> None:
        """Serve until a control request ends it. An exception of a step is not caught here: it ends the engine."""
        self._grammars.begin()
        wait_s: float | None = 0
        while not self._control.stopping:
            self.take(self._channel.receive(wait_s))
            progressed = self.step()
            wait_s = 0 if progressed else self._patience_s
        self._end_all()

    @property
    def _patience_s(self) -> float | None:
        """How long to wait for messages when there was nothing to run."""
        if self._tiers is not None and self._tiers.busy:
            return _MOVING_S
        return _STALLED_S if self.busy else None

    @property
    def busy(self) -> bool:
        """Requests live or plans are in flight."""
        return bool(self._flights or self._by_id)

    def step(self) -> bool:
        """Plan, execute, advance, emit. False when there was nothing to run."""
        if self._grammars.busy:
            self._take_grammars()
        told = self._tiers is not None and self._tiers.tell()
        if told:
            self._gauges.changed()
        plan = self._plan()
        if plan is not None:
            self._flights.append(self._execute(plan))
        ready = len(self._flights) - (self._depth if plan is not None else 0)
        for _ in range(ready):
            flight = self._flights.popleft()
            self._emit(flight, *self._advance(flight))
        if self._sessions:
            self._answer_sessions()
        self._send(idle=plan is None and not ready)
        if self._kv_events is not None:
            self._kv_events.publish(self._scheduler.drain_kv_events())
        return plan is not None or ready > 0 or told

    def _plan(self) -> ExecutionPlan | None:
        """The next plan; ``None`` when it has no rows."""
        now = self._clock()
        plan = self._scheduler.next_execution_plan(now)
        for number in plan.retracted_ids.tolist():
            if (request := self._by_id.get(number)) is not None:
                request.retract(now)
        self._ended(plan.finished_ids.tolist(), plan.finished_reasons.tolist())
        if plan.num_rows:
            return plan
        # Pages that turned out to be in the cache twice were exchanged, or cache operations begin.
        if len(plan.delta_page) or (self._tiers is not None and plan.num_transfers):
            self._executor.execute(plan)
        return None

    def _execute(self, plan: ExecutionPlan) -> _Flight:
        began = self._clock()
        ids = plan.request_ids.tolist()
        new = []
        for row in np.flatnonzero(plan.flags & NEW_IN_SLOT).tolist():
            # One that was aborted in this very moment still runs its step; its parameters no longer matter.
            if (request := self._by_id.get(ids[row])) is not None:
                if (info := self._scheduler.request_info(request.id)) is not None:
                    request.found(info)
                new.append(request.enter_slot(int(plan.slots[row]), int(plan.context_lens[row]), began))
        step = self._executor.execute(plan, new)
        loads = self._tiers.loads(plan) if self._tiers is not None else ()
        return _Flight(plan.plan_id, ids, step, began, self._clock() - began if step.done else 0, loads)

    def _advance(self, flight: _Flight) -> tuple[list[Judgement], AdvanceResult]:
        """Judge the rows' tokens and tell the scheduler; waits for the step where the device still works on it."""
        result = flight.step.result()
        step_us = flight.step_us
        if not step_us:  # the device began with it when the step before it had ended
            now = self._clock()
            step_us, self._ended_us = now - max(flight.began_us, self._ended_us), now
        reloads = self._tiers.failed_rows(flight.loads) if self._tiers is not None else []
        self._void(flight, reloads)
        requests = [self._by_id.get(number) for number in flight.ids]
        take_prompt_logprobs(requests, result.prompt_logprobs)
        judgements, counts, outcomes = judge(requests, result)
        counts[reloads], outcomes[reloads] = 0, OUTCOME_RELOAD
        self._gauges.stepped(sum(len(judgement.tokens) for judgement in judgements))
        advanced = self._scheduler.advance(flight.plan_id, counts, result.tokens, outcomes, step_us)
        return judgements, advanced

    def _void(self, flight: _Flight, rows: Sequence[int]) -> None:
        """Rows that read pages which had not come: nothing that they or their successors in flight yield is their requests'."""
        for number in {flight.ids[row] for row in rows}:
            for each in (flight, *self._flights):
                each.ids = [0 if other == number else other for other in each.ids]

    def _emit(self, flight: _Flight, judgements: list[Judgement], advanced: AdvanceResult) -> None:
        """Tell what the rows yielded and which requests ended with it."""
        now = self._clock()
        ids, reasons = advanced.finished_ids.tolist(), advanced.finished_reasons.tolist()
        finishes = {number: REASONS[reason] for number, reason in zip(ids, reasons, strict=True)}
        logprobs = _logprobs_by_row(flight.step.result())
        for judgement in judgements:
            request = judgement.request
            finish = finishes.get(request.id)
            self._outbox.append(output_of(judgement, finish, logprobs.get(judgement.row), now))
            if finish is not None:
                self._forget(request, finish)
        self._ended(ids, reasons)

    def take(self, messages: Sequence[ToEngine]) -> None:
        """Handle messages in order; new requests that stand together are submitted together."""
        waiting: list[LiveRequest] = []
        for message in messages:
            if isinstance(message, GenerateRequest):
                self._admit(message, waiting)
                continue
            self._submit(waiting)
            if isinstance(message, AbortRequest):
                self._cut(message.rid, FinishReason.ABORT)
            elif isinstance(message, StopRequest):
                self._cut(message.rid, FinishReason.STOP)
            else:
                self._answer(message)
        self._submit(waiting)

    def _admit(self, message: GenerateRequest, waiting: list[LiveRequest]) -> None:
        if message.rid in self._by_rid:
            self._unknown.warning("Request %d is live already; the second one of that number is ignored", message.rid)
            return
        try:
            if message.grammar is not None:
                self._grammars.check(message.grammar)
            request = self._admission.admit(message, self._clock())
            there = message.grammar is None or self._grammars.ask(request, message.grammar)
        except RequestError as error:
            self._refuse(message.rid, error.message, error.param or "", error.status)
            return
        self._by_id[request.id] = self._by_rid[request.rid] = request
        if there:
            waiting.append(request)
        self._gauges.changed()

    def _take_grammars(self) -> None:
        """Submit the requests whose grammars are there, and refuse those whose failed."""
        waiting: list[LiveRequest] = []
        for request, error in self._grammars.collect():
            request.grammar_us = self._clock()
            if error is None:
                waiting.append(request)
            else:
                self._forget(request, None)
                self._refuse(request.rid, error.message, error.param or "grammar", error.status)
        self._submit(waiting)

    def wait_for_grammars(self, timeout_s: float) -> None:
        """Wait until a grammar is there, where requests wait for one: for who has nothing else to wait for."""
        self._grammars.wait(timeout_s)

    def _submit(self, waiting: list[LiveRequest]) -> None:
        if not waiting:
            return
        results = self._scheduler.submit_requests([request_spec(request) for request in waiting], self._clock())
        for request, result in zip(waiting, results, strict=True):
            if not result.accepted:
                self._forget(request, None)
                self._refuse(request.rid, result.reason, REFUSED_PARAMS.get(int(result.refusal), ""))
        waiting.clear()
        self._gauges.changed()

    def _refuse(self, rid: int, reason: str, param: str, status: int = 400) -> None:
        ended = FinishReason.ERROR.value
        self._outbox.append(
            TokenOutput(
                rid=rid, tokens=[], finish=ended, error=reason, param=param, status=0 if status == 400 else status
            )
        )
        self._gauges.ended(FinishReason.ERROR)

    def _cut(self, rid: int, reason: FinishReason) -> None:
        """End a request at once, in whatever state. Late results of a step in flight find no request and are dropped."""
        request = self._by_rid.get(rid)
        if request is None:
            self._unknown.warning("Request %d is not live; the message to end it is ignored", rid)
            return
        # A stop string is an end like any other: admission learns from its length.
        stopped = reason is FinishReason.STOP
        self._scheduler.abort(request.id, SchedulerReason.STOP if stopped else SchedulerReason.ABORTED)
        if self._grammars.busy:
            self._leave_grammar(request)
        self._finish(request, reason)

    def _leave_grammar(self, request: LiveRequest) -> None:
        if self._grammars.leave(request):
            request.grammar_us = self._clock()

    def _ended(self, ids: list[int], reasons: list[int]) -> None:
        """Requests that the scheduler ended and that nobody has told of yet."""
        for number, reason in zip(ids, reasons, strict=True):
            if (request := self._by_id.get(number)) is not None:
                self._finish(request, REASONS[reason])

    def _finish(self, request: LiveRequest, reason: FinishReason) -> None:
        self._outbox.append(
            TokenOutput(rid=request.rid, tokens=[], finish=reason.value, stats=request.stats(self._clock()))
        )
        self._forget(request, reason)

    def _forget(self, request: LiveRequest, reason: FinishReason | None) -> None:
        del self._by_id[request.id], self._by_rid[request.rid]
        if reason is not None:
            self._gauges.ended(reason)

    def _answer(self, message: ControlRequest) -> None:
        if message.method in SESSION_METHODS:
            self._sessions.add(message)
        else:
            self._channel.send(self._control.answer(message))

    def _answer_sessions(self) -> None:
        for reply in self._sessions.answers(self._clock()):
            self._channel.send(reply)
            self._gauges.changed()

    def _send(self, *, idle: bool) -> None:
        """Everything since the last message, in one; figures with it when they are due."""
        stats = self._gauges.due(self._clock(), idle=idle)
        if self._outbox or stats is not None:
            self._channel.send(Outputs(self._outbox, stats))
            self._outbox = []

    def _end_all(self) -> None:
        """The engine ends in good order: what still lives is told so."""
        try:
            self._abort_all()
            self._send(idle=True)
        finally:
            self.close()

    def _abort_all(self) -> None:
        """Leave no request and no plan in flight: what the scheduler plans from here on are cache operations only."""
        for request in list(self._by_id.values()):
            self._cut(request.rid, FinishReason.ABORT)
        while self._flights:
            flight = self._flights.popleft()
            self._emit(flight, *self._advance(flight))

    def close(self) -> None:
        """Give back what lives outside this process; the loop cannot be used any more. Pages on their way to host and store get there first, within reason.

        Everything is given back, whatever raises; a fault is raised when that is done.
        """
        with ExitStack() as ending:  # the last one first
            ending.callback(self._close_kv_events)
            ending.callback(self._close_tiers)
            ending.callback(self._grammars.close)
            ending.callback(self._abort_all)

    def _close_tiers(self) -> None:
        if self._tiers is not None:
            try:
                self._tiers.close(self._plan)
            finally:
                self._tiers = None

    def _close_kv_events(self) -> None:
        events, self._kv_events = self._kv_events, None
        if events is not None:
            try:
                events.publish(self._scheduler.drain_kv_events())
            finally:
                events.close()


def _logprobs_by_row(result: StepResult) -> dict[int, list[TokenLogprobs]]:
    if result.logprobs is None or result.logprob_rows is None or result.top is None:
        return {}
    entries = token_logprobs(result.logprobs, result.top.tolist())
    return {row: [entry] for row, entry in zip(result.logprob_rows.tolist(), entries, strict=True)}

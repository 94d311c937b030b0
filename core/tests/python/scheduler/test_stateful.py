"""Random sequences of calls through the binding, against a plain Python model of the rules."""

from __future__ import annotations

import hypothesis.strategies as st
from engine_model import Engine, make_config
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenspeed import _scheduler as ts


class SchedulerMachine(RuleBasedStateMachine):
    engine: Engine
    next_id = 0

    @initialize(
        page=st.sampled_from([1, 2, 4]),
        pages=st.integers(4, 20),
        seqs=st.integers(1, 4),
        budget=st.integers(1, 24),
        width=st.integers(1, 3),
        overlap=st.integers(0, 1),
    )
    def start(self, page: int, pages: int, seqs: int, budget: int, width: int, overlap: int) -> None:
        self.engine = Engine(
            make_config(page=page, pages=pages, seqs=seqs, budget=budget, width=width, overlap=overlap, model_len=60)
        )
        self.submitted = 0

    @rule(
        family=st.integers(0, 1),
        shared=st.integers(0, 20),
        own=st.integers(0, 6),
        new=st.integers(1, 12),
        priority=st.integers(-1, 1),
        session=st.integers(-1, 2),
        retain_us=st.sampled_from([0, 5, 20, 1000]),
    )
    def submit(self, family: int, shared: int, own: int, new: int, priority: int, session: int, retain_us: int) -> None:
        tokens = [100 * family + i for i in range(shared)] + [1000 + i % 2 for i in range(own)]
        self.next_id += 1
        retain_us = retain_us if session >= 0 else 0
        result = self.engine.submit(self.next_id, tokens, new, priority=priority, session=session, retain_us=retain_us)
        pool = self.engine.page * self.engine.config.groups[0].num_pages
        assert result.accepted == (0 < len(tokens) <= min(pool, 59))
        assert result.accepted == (result.reason == "")
        self.submitted += result.accepted

    @precondition(lambda self: self.engine.can_plan())
    @rule()
    def plan(self) -> None:
        self.engine.plan()

    @precondition(lambda self: bool(self.engine.steps))
    @rule(
        token=st.integers(0, 1),
        finish=st.booleans(),
        accept=st.integers(1, 3),
        fixed_us=st.integers(0, 500),
        pair_us=st.sampled_from([0, 1, 5, 100]),
    )
    def advance(self, token: int, finish: bool, accept: int, fixed_us: int, pair_us: int) -> None:
        ending = frozenset({min(self.engine.live)}) if finish and self.engine.live else frozenset[int]()
        step = self.engine.steps[0].prefill
        self.engine.advance(token, ending, accept, fixed_us + 10 * step.tokens + int(pair_us * step.attended))

    @rule(index=st.integers(0, 30))
    def abort(self, index: int) -> None:
        self.engine.abort(index)

    @rule(
        family=st.integers(0, 4),
        shared=st.integers(1, 20),
        new=st.integers(1, 3),
        session=st.integers(0, 2),
        retain_us=st.sampled_from([50, 1000]),
        stop=st.booleans(),
    )
    def take_a_turn(self, family: int, shared: int, new: int, session: int, retain_us: int, stop: bool) -> None:
        """A turn of a session to its end, or as far as it comes. What is on its way to or from the host is answered where nothing else can go on."""
        self.submit(family, shared, 0, new, 0, session, retain_us)
        request, engine = self.next_id, self.engine
        for _ in range(60):
            if request not in engine.live:
                return
            idle = engine.can_plan() and engine.plan().num_rows == 0
            for op in list(engine.tiers.open) if idle else ():
                engine.answer(op)
            while engine.steps and (idle or not engine.can_plan()):
                engine.advance(finish=frozenset({request}) if stop else frozenset[int]())

    @rule()
    def flush(self) -> None:
        before = self.engine.scheduler.stats().pages_cached[0]
        assert self.engine.scheduler.flush_cache() == before
        self.engine.sessions.kept.clear()

    @rule(session=st.integers(-1, 3))
    def release(self, session: int) -> None:
        known = self.engine.sessions.kept.pop(session, None)
        released = self.engine.scheduler.release_session(session)
        assert released == (known is not None) or not self.knows_sessions()
        assert not self.engine.scheduler.release_session(session)

    @rule(session=st.integers(-1, 3))
    def prefetch(self, session: int) -> None:
        kept = self.engine.sessions.kept.get(session)
        pages = self.engine.scheduler.prefetch_session(session, self.engine.now)
        if self.knows_sessions():
            assert pages == -1 if kept is None else 0 <= pages <= len(kept.pages)
        groups = self.engine.config.groups
        assert -1 <= pages <= sum(group.num_pages for group in groups)
        assert pages <= 0 or any(group.host_pages for group in groups)

    def knows_sessions(self) -> bool:
        """Whether the model does: where there are windows or states, sessions give way for those too, by what of them can be resumed."""
        return len(self.engine.config.groups) == 1

    @invariant()
    def sessions_are_those_of_the_model(self) -> None:
        if not hasattr(self, "engine"):
            return
        stats, model = self.engine.scheduler.stats(), self.engine.sessions
        if self.knows_sessions():
            assert (stats.sessions, stats.retained_pages) == (len(model.kept), len(model.pages))
        assert stats.retained_pages <= model.bound
        assert (stats.sessions > 0) == (stats.retained_pages > 0)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        stats = self.engine.scheduler.stats()
        total = self.engine.config.groups[0].num_pages
        assert stats.pages_active[0] + stats.pages_cached[0] + stats.pages_free[0] == total
        assert stats.submitted == self.submitted
        assert stats.prefill_tokens == self.engine.prefilled
        assert stats.waiting + stats.retracted == self.engine.scheduler.num_waiting

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.drain()
        stats = self.engine.scheduler.stats()
        assert not any(stats.pages_active)
        assert stats.slots_free == self.engine.config.max_num_seqs
        assert stats.finished + stats.aborted == self.submitted
        assert all(reason != ts.FinishReason.FAILED for reason in self.engine.reasons.values())


class TierMachine(SchedulerMachine):
    """The same, with a host tier and a store: transfers end in any order, wholly or in part."""

    @initialize(
        page=st.sampled_from([1, 2, 4]),
        pages=st.integers(4, 14),
        seqs=st.integers(1, 4),
        budget=st.integers(1, 24),
        overlap=st.integers(0, 1),
        host=st.integers(1, 40),
        policy=st.sampled_from(ts.WritePolicy),
        l3=st.booleans(),
        threshold=st.integers(1, 8),
    )
    def start(
        self,
        page: int,
        pages: int,
        seqs: int,
        budget: int,
        overlap: int,
        host: int,
        policy: ts.WritePolicy,
        l3: bool,
        threshold: int,
    ) -> None:
        self.engine = Engine(
            make_config(
                page=page, pages=pages, seqs=seqs, budget=budget, overlap=overlap, model_len=60, host=host,
                write_policy=policy, l3=l3, prefetch_threshold=threshold, prefetch_timeout_us=20, kv_events=True,
            )
        )  # fmt: skip
        self.submitted = 0

    @precondition(lambda self: bool(self.engine.tiers.open))
    @rule(index=st.integers(0, 50), wanted=st.sampled_from([0, 1, 2, 100, 100, 100]))
    def answer(self, index: int, wanted: int) -> None:
        ops = list(self.engine.tiers.open)
        self.engine.answer(ops[index % len(ops)], wanted)

    @precondition(lambda self: bool(self.engine.steps))
    @rule(token=st.integers(0, 1), loaded=st.sampled_from([0, 1, 100, 100]))
    def advance_after_a_load(self, token: int, loaded: int) -> None:
        self.engine.advance(token, loaded=loaded)

    @rule()
    def flush(self) -> None:
        before = self.engine.scheduler.stats()
        assert self.engine.scheduler.flush_cache() == before.pages_cached[0] + before.host_pages_cached[0]
        self.engine.sessions.kept.clear()

    @invariant()
    def transfers_are_accounted_for(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.scheduler.cache_ops_in_flight == len(self.engine.tiers.open)
            stats = self.engine.scheduler.stats()
            assert stats.host_pages_free[0] + stats.host_pages_cached[0] <= stats.host_pages_total[0]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.drain()
        while self.engine.tiers.open or self.engine.scheduler.cache_ops_pending:
            for op in list(self.engine.tiers.open):
                self.engine.answer(op)
            self.engine.plan()
        super().teardown()
        self.engine.scheduler.flush_cache()
        assert self.engine.scheduler.stats().host_pages_free == [
            group.host_pages for group in self.engine.config.groups
        ]


class GroupMachine(TierMachine):
    """The same, with a window and a recurrent group, each with host pages of its own or none."""

    @initialize(
        page=st.sampled_from([1, 2, 4]),
        pages=st.integers(4, 14),
        seqs=st.integers(1, 4),
        budget=st.integers(1, 24),
        overlap=st.integers(0, 1),
        host=st.integers(0, 40),
        policy=st.sampled_from(ts.WritePolicy),
        window=st.integers(0, 12),
        interval=st.integers(0, 3),
        spare=st.integers(0, 8),
        group_host=st.integers(0, 12),
        l3=st.booleans(),
        threshold=st.integers(1, 8),
    )
    def start(  # type: ignore[override]
        self,
        page: int,
        pages: int,
        seqs: int,
        budget: int,
        overlap: int,
        host: int,
        policy: ts.WritePolicy,
        window: int,
        interval: int,
        spare: int,
        group_host: int,
        l3: bool,
        threshold: int,
    ) -> None:
        further = []
        if window:
            needed = (window + overlap + page - 2) // page + 1
            further.append(
                ts.CacheGroupConfig(
                    page_size=page, num_pages=needed + spare, kind=ts.CacheGroupKind.WINDOW, window=window, host_pages=group_host
                )
            )  # fmt: skip
        if interval:
            further.append(
                ts.CacheGroupConfig(
                    page_size=page * interval, num_pages=2 + spare, kind=ts.CacheGroupKind.RECURRENT, host_pages=group_host
                )
            )  # fmt: skip
        self.engine = Engine(
            make_config(
                page=page, pages=pages, seqs=seqs, budget=budget, overlap=overlap, model_len=60, host=host,
                further=further, write_policy=policy, l3=l3 and host > 0, prefetch_threshold=threshold,
                prefetch_timeout_us=20, kv_events=True,
            )
        )  # fmt: skip
        self.submitted = 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TierMachine.TestCase.settings = settings(SchedulerMachine.TestCase.settings)
TestScheduler = SchedulerMachine.TestCase
GroupMachine.TestCase.settings = settings(SchedulerMachine.TestCase.settings)
TestTiers = TierMachine.TestCase
TestGroups = GroupMachine.TestCase

"""The smallest engine around a scheduler: page tables from deltas, and for each page the tokens whose KV it would hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from group_model import GroupRow, Groups, StateOp
from prefill_model import PrefillModel, PrefillStep
from session_model import Sessions
from tier_model import Tiers

from tokenspeed import _scheduler as ts

__all__ = ["Engine", "Known", "Row", "Step", "make_config"]


def make_config(
    *,
    page: int = 4,
    pages: int = 32,
    seqs: int = 4,
    budget: int = 16,
    model_len: int = 200,
    width: int = 1,
    overlap: int = 0,
    host: int = 0,
    further: Sequence[ts.CacheGroupConfig] = (),
    **tiers: Any,
) -> ts.SchedulerConfig:
    """``further``: cache groups after the full one; ``tiers``: fields of SchedulerConfig about the tiers below the device."""
    group = ts.CacheGroupConfig(page_size=page, num_pages=pages, host_pages=host)
    return ts.SchedulerConfig(
        groups=[group, *further],
        max_num_seqs=seqs,
        max_batched_tokens=budget,
        max_model_len=model_len,
        max_row_width=width,
        overlap_depth=overlap,
        **tiers,
    )


@dataclass
class Known:
    """What the model knows of a request."""

    tokens: list[int]
    prompt: int
    limit: int
    kv: int = 0
    aborted: bool = False
    stay: int = 0  # counts its stays in a slot
    lost: int = -1  # the stay whose prefix did not come back from the host: nothing of it counts
    session: int = -1
    retain_us: int = 0
    rows: int = 0  # in flight
    loads: list[int] = field(default_factory=list)  # the transfers that bring its prefix in this stay
    before_load: int = 0  # pages of the prefix that were there without them
    leaves: int | None = None  # pages that it leaves behind, once it has ended well


class Row(NamedTuple):
    """A row of a plan, copied out of its views."""

    request: int
    slot: int
    context: int
    query: int
    samples: bool
    extend: bool
    inputs: list[int]
    table: list[int]
    stay: int
    loads: list[int]  # the transfers that bring its prefix, one for each group
    groups: GroupRow


@dataclass
class Step:
    """A plan in flight, copied out of its views."""

    plan_id: int
    rows: list[Row] = field(default_factory=list)
    prefill: PrefillStep = field(default_factory=PrefillStep)
    states: list[StateOp] = field(default_factory=list)


class Engine:
    """Drives a scheduler and checks each plan by plain rules."""

    def __init__(self, config: ts.SchedulerConfig) -> None:
        self.config = config
        self.scheduler = ts.Scheduler(config)
        self.page = config.groups[0].page_size
        self.tables: list[dict[int, int]] = [{} for _ in range(config.max_num_seqs)]
        self.groups = Groups(config)
        self.content = self.groups.cells[0]
        self.tiers = Tiers(self.groups.cells, self.groups.sizes)
        self.live: dict[int, Known] = {}
        self.leaving: dict[int, Known] = {}  # ended well, with a step in flight
        self.sessions = Sessions(self.page, config.groups[0].num_pages * config.retain_percent // 100)
        self.reasons: dict[int, int] = {}
        self.steps: list[Step] = []
        self.now = 0
        self.prefilled = 0
        self.costs = PrefillModel()

    def submit(self, id: int, tokens: list[int], max_new: int = 4, **options: int) -> ts.SubmitResult:
        self.now += 1
        spec = ts.RequestSpec(id=id, tokens=tokens, max_new_tokens=max_new, **options)
        (result,) = self.scheduler.submit_requests([spec], self.now)
        if result.accepted:
            limit = min(max_new, self.config.max_model_len - len(tokens))
            session, retain_us = options.get("session", -1), options.get("retain_us", 0)
            self.live[id] = Known(list(tokens), len(tokens), limit, session=session, retain_us=retain_us)
        self.scheduler.check_integrity()
        return result

    def can_plan(self) -> bool:
        return len(self.steps) <= self.config.overlap_depth

    def plan(self) -> ts.ExecutionPlan:
        self.now += 1
        plan = self.scheduler.next_execution_plan(self.now)
        self.scheduler.check_integrity()
        self.sessions.expire(self.now)
        columns = (plan.delta_group, plan.delta_slot, plan.delta_index, plan.delta_page)
        deltas = list(zip(*(column.tolist() for column in columns), strict=True))
        assert len({delta[:3] for delta in deltas}) == len(deltas), "a table entry stands twice in a plan"
        for group, slot, index, page in deltas:
            if group == 0:
                self.tables[slot][index] = page
        states = self.groups.take(plan)
        transfers = {op: transfer for op, transfer in self.tiers.begin(plan) if transfer.rows[0] >= 0}
        loads: dict[int, list[int]] = {}
        for op, transfer in transfers.items():
            loads.setdefault(transfer.rows[0], []).append(op)
        step = Step(plan.plan_id, states=states)
        offset = 0
        assert plan.num_tokens <= self.config.max_step_tokens
        for row in range(plan.num_rows):
            request, slot = int(plan.request_ids[row]), int(plan.slots[row])
            context, query, flags = (int(a[row]) for a in (plan.context_lens, plan.query_lens, plan.flags))
            extend = row < plan.num_extend_rows
            known = self.live[request]
            assert not known.aborted
            if flags & ts.RowFlags.NEW_IN_SLOT:
                known.kv = context
                known.stay += 1
                known.loads = loads.get(row, [])
                loaded = sum(len(transfers[op].device) for op in known.loads if transfers[op].group == 0)
                known.before_load = context // self.page - loaded
            known.rows += 1
            self.prefilled += query if extend else 0
            inputs = plan.input_ids[offset : offset + query].tolist()
            offset += query
            table = [self.tables[slot].get(i, -1) for i in range((context + query - 1) // self.page + 1)]
            samples = bool(flags & ts.RowFlags.SAMPLES)
            step.rows.append(
                Row(
                    request, slot, context, query, samples, extend, inputs, table, known.stay,
                    loads.get(row, []), self.groups.row(slot),
                )
            )  # fmt: skip
            for group, page in self.groups.written(step.rows[-1].groups, context, context + query):
                assert not self.tiers.moves(page, group), "a row writes a window or a state in transfer"
            for index in range(context // self.page, (context + query - 1) // self.page + 1):
                assert not self.tiers.moves(table[index]), "a row writes a page in transfer"
        for begin, end, first, pages in plan.prefix_intervals.tolist():
            assert plan.num_extend_rows <= begin < end - 1 < plan.num_rows
            tables = [tuple(step.rows[row].table[first : first + pages]) for row in range(begin, end)]
            assert len(set(tables)) == 1, "rows of an interval differ in a page"
        queries, contexts = plan.query_lens.tolist(), plan.context_lens.tolist()
        extends = plan.num_extend_rows
        chunks = list(zip(queries[:extends], contexts[:extends], strict=True))
        step.prefill = self.costs.check(chunks, sum(queries[extends:]), self.config.max_batched_tokens, self.page)
        self.ended(plan.finished_ids, plan.finished_reasons)
        if step.rows:
            self.steps.append(step)
        return plan

    def answer(self, op: int, wanted: int = 1 << 20) -> None:
        """Ends a transfer with up to ``wanted`` good pages."""
        good = self.tiers.answer(op, wanted)
        self.scheduler.cache_done([op], [good])
        self.scheduler.check_integrity()

    def advance(
        self,
        token: int = 7,
        finish: frozenset[int] = frozenset(),
        accept: int = 1,
        step_us: int = 0,
        loaded: int = 1 << 20,
    ) -> ts.AdvanceResult:
        """Answers the oldest plan. Each sampling row yields `token`, a decode row up to `accept` times; load backs bring `loaded` pages."""
        step = self.steps.pop(0)
        rows, width = len(step.rows), self.config.max_row_width
        counts = np.zeros(rows, np.int32)
        outcomes = np.zeros(rows, np.int32)
        # What comes back from the host may be the source of a copy of this plan.
        settled = [[self.tiers.came(op, loaded) for op in row.loads] for row in step.rows]  # each of them, good or not
        came = [all(ops) for ops in settled]
        self.groups.apply(step.states)
        for i, row in enumerate(step.rows):
            known = self.live.get(row.request)
            counts[i] = 0 if not row.samples else 1 if row.extend else min(accept, row.query)
            outcomes[i] = ts.Outcome.FINISH if row.samples and row.request in finish else ts.Outcome.CONTINUE
            if not came[i]:
                counts[i], outcomes[i] = 0, ts.Outcome.RELOAD
                if known is not None:
                    known.lost = row.stay
            if known is not None and not known.aborted and known.lost != row.stay:
                self.compute(row, int(counts[i]), token)
            else:
                self.groups.spoil(row.groups, row.context, row.context + row.query)
        result = self.scheduler.advance(
            step.plan_id, counts, np.full((rows, width), token, np.int32), outcomes, step_us
        )
        self.scheduler.check_integrity()
        self.costs.observe(step.prefill, step_us)
        finished = frozenset(result.finished_ids.tolist())
        assert self.scheduler.stats().context_weight == self.costs.weight
        for i, row in enumerate(step.rows):
            refusal = ts.RowRefusal(int(result.row_refusals[i]))
            known = self.live.get(row.request)
            told = bool(row.loads) and outcomes[i] == ts.Outcome.RELOAD
            late = known is None or known.aborted or (known.lost == row.stay and not told)
            assert refusal is (ts.RowRefusal.LATE if late else ts.RowRefusal.NONE)
            if known is not None and not late and not told:
                known.kv += row.query if row.extend else int(counts[i])
                known.tokens += [token] * int(counts[i])
                assert len(known.tokens) - known.prompt <= known.limit
            # What draws to its end with a step in flight is settled when that has ended.
            known = known or self.leaving[row.request]
            known.rows -= 1
            if row.request in finished and row.request in self.live and not known.aborted and known.leaves is None:
                self.end_well(row.request, known)
            elif known.leaves is not None and known.rows == 0:
                self.retain(row.request, known)
        self.ended(result.finished_ids, result.finished_reasons)
        return result

    def compute(self, row: Row, count: int, token: int) -> None:
        """A row must find exactly the KV of its own context through its table, and gets its own tokens as input."""
        request, context, query, extend, inputs, table = (
            row.request,
            row.context,
            row.query,
            row.extend,
            row.inputs,
            row.table,
        )
        known = self.live[request]
        assert known.kv <= context
        tokens = known.tokens + [token] * (0 if extend else max(0, count - 1)) + [-9] * query
        for position in range(known.kv + query):
            cell = (table[position // self.page], position % self.page)
            assert cell[0] >= 0, "a row lacks a page"
            prefix = tuple(tokens[: position + 1])
            if position < known.kv:
                assert self.content.get(cell) == prefix, "a row reads KV that is not its own"
            else:
                given = inputs[position - known.kv]
                assert given == (-1 if given == -1 and not extend else tokens[position])
                self.content[cell] = prefix
        self.groups.compute(row.groups, tokens, known.kv, known.kv + query)

    def end_well(self, request: int, known: Known) -> None:
        """What comes back from the host is not in the cache before all of it has come, nor is anything behind it."""
        loading = any(op in self.tiers.open for op in known.loads)
        known.leaves = known.before_load if loading else known.kv // self.page
        self.leaving[request] = known
        if known.rows == 0:
            self.retain(request, known)

    def retain(self, request: int, known: Known) -> None:
        assert known.leaves is not None
        del self.leaving[request]
        self.sessions.end(known.session, known.retain_us, known.tokens, known.leaves, self.now)

    def abort(self, id: int, reason: ts.FinishReason = ts.FinishReason.ABORTED) -> bool:
        taken = self.scheduler.abort(id, reason)
        assert taken == (id in self.live and not self.live[id].aborted)
        if taken:
            self.live[id].aborted = True
        self.scheduler.check_integrity()
        return taken

    def ended(self, ids: np.ndarray, reasons: np.ndarray) -> None:
        for request, reason in zip(ids.tolist(), reasons.tolist(), strict=True):
            known = self.live.pop(request)  # KeyError: reported twice
            self.reasons[request] = reason
            if reason == ts.FinishReason.LENGTH and known.leaves is None:
                self.end_well(request, known)  # it had the whole pool, and no page more

    def drain(self, limit: int = 20_000) -> None:
        while self.scheduler.has_work() or self.steps:
            limit -= 1
            assert limit > 0, "the scheduler does not come to an end"
            idle = self.can_plan() and self.plan().num_rows == 0
            for op in list(self.tiers.open):
                self.answer(op)
            while self.steps and (idle or len(self.steps) > self.config.overlap_depth):
                self.advance()
        self.plan()
        assert not self.live, "a request was never reported as finished"

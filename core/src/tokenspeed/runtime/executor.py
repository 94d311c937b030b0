"""Runs a plan on this rank: page tables, batch, model, sampler; answers with a step on its way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.interfaces.model import CausalLM
from tokenspeed.runtime.batch import BatchBuilder
from tokenspeed.runtime.cache_executor import CacheExecutor
from tokenspeed.runtime.forward import Forward
from tokenspeed.runtime.graphs import DecodeGraphs
from tokenspeed.runtime.kv_pool import KVPool
from tokenspeed.runtime.logprobs import gather_logprobs
from tokenspeed.runtime.mixed_graphs import MixedGraphs
from tokenspeed.runtime.page_tables import PageTables
from tokenspeed.runtime.plan import SAMPLES, PlanView, SlotRequest
from tokenspeed.runtime.results import PendingStep, PromptLogprobs, StepResult
from tokenspeed.runtime.sampler import Sampler, SampleResult
from tokenspeed.runtime.slot_sampling import SlotSampling
from tokenspeed.runtime.transfer import Download, to_device

__all__ = ["ModelExecutor", "PromptLogprobs", "StepResult"]

#: Prompt tokens whose logits are held at once: 256 rows of a 150k vocabulary are 150 MB in fp32.
_PROMPT_LOGITS = 256


class ModelExecutor:
    """State of one rank that persists between steps: page tables, last tokens, sampling parameters by slot, captured graphs.

    Args:
        model: gives logits; ``forward`` runs it over a batch.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        forward: Forward,
        sampler: Sampler,
        state: SlotSampling,
        tables: PageTables,
        page_sizes: Sequence[int],
        max_rows: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._forward = forward
        self._sampler = sampler
        self._state = state
        self._tables = tables
        self._device = device
        #: (slots + 1) int64, the token each slot sampled last; the last entry is the spare slot's
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._cache: CacheExecutor | None = None
        self._states: KVPool | None = None
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._builder = BatchBuilder(
            max_rows=max_rows,
            max_tokens=max_tokens,
            page_sizes=page_sizes,
            tables=tables,
            last_tokens=self.last_tokens,
            device=device,
        )

    def use_cache(self, cache: CacheExecutor) -> None:
        """Carry out the cache operations of plans with ``cache``."""
        self._cache = cache

    def use_states(self, pool: KVPool) -> None:
        """Zero and copy the states of ``pool``'s recurrent groups before the steps that need it."""
        self._states = pool
        for index, group in enumerate(pool.groups):
            if group.kind == "recurrent":
                self._tables.set_spare(index, pool.num_pages[index])

    @property
    def state_groups(self) -> tuple[int, ...]:
        """Numbers of the recurrent groups whose states plans zero and copy."""
        groups = self._states.groups if self._states is not None else ()
        return tuple(index for index, group in enumerate(groups) if group.kind == "recurrent")

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Prompt tokens that steps of pieces of prompts and decodes are filled up to, ascending; none where they run as they are."""
        return self._mixed.token_sizes if self._mixed is not None else ()

    def use_graphs(self, graphs: DecodeGraphs, mixed: MixedGraphs | None = None) -> None:
        """Replay ``graphs`` and ``mixed`` for the steps that they serve."""
        self._graphs, self._mixed = graphs, mixed

    @torch.inference_mode()
    def execute(self, plan: PlanView, new: Sequence[SlotRequest] = ()) -> PendingStep:
        """Queue one plan; ``new`` holds a ``SlotRequest`` for each row that carries ``NEW_IN_SLOT``. A plan without rows changes page tables only."""
        for request in new:
            self._sampler.load(request)
        self._tables.apply(plan.delta_group, plan.delta_slot, plan.delta_index, plan.delta_page)
        if self._cache is not None:
            self._cache.begin_plan(plan)
            self._cache.wait_states()  # one that comes from the host may be copied at once
        if self._states is not None and len(plan.state_kind):
            self._states.prepare_states(plan.state_kind, plan.state_group, plan.state_source, plan.state_target)
        if not plan.num_rows:
            return PendingStep(result=_nothing(0, []))
        if self._graphs is not None and self._graphs.serves(plan):
            return self._replay(self._graphs, plan)
        if self._mixed is not None and self._mixed.serves(plan) and not self._wants_prompt_logprobs(plan):
            return self._replay_mixed(self._mixed, plan)
        batch = self._builder.build(plan)
        assert batch.output_index is not None, "the builder names the rows that sample"
        sampling = np.flatnonzero(plan.flags & SAMPLES)
        hidden = self._forward(batch)
        prompt_logprobs = self._prompt_logprobs(plan, hidden)
        if not len(sampling):
            nothing = _nothing(plan.num_rows, prompt_logprobs)
            if self._device.type == "cpu":
                return PendingStep(result=nothing)
            end = Download(batch.query_start)  # so that the loop does not run ahead of the device by more than a step
            return PendingStep(lambda: (end.wait(), nothing)[1])
        logits = self._model.logits(
            hidden if batch.num_tokens == len(sampling) else hidden.index_select(0, batch.output_index)
        )
        slots = plan.slots[sampling]
        sampled = self._sampler.sample(logits, slots, plan.output_lens[sampling])
        return self._pending(plan.num_rows, sampling, slots, sampled, prompt_logprobs)

    def _replay(self, graphs: DecodeGraphs, plan: PlanView) -> PendingStep:
        """A step of decodes alone, all of which sample."""
        self._before_graph()
        output = graphs.replay(plan)
        rows = np.arange(plan.num_rows)
        if not self._state.rows(plan.slots).plain:
            sampled = self._sampler.sample(output.logits, plan.slots, plan.output_lens)
            return self._pending(plan.num_rows, rows, plan.slots, sampled, [])
        drawn = Download(output.tokens)
        return PendingStep(lambda: _scatter(len(rows), rows, drawn.wait()[:, None], None, []))

    def _replay_mixed(self, graphs: MixedGraphs, plan: PlanView) -> PendingStep:
        """A step of pieces of prompts and decodes."""
        self._before_graph()
        output, place = graphs.replay(plan)
        sampling = np.flatnonzero(plan.flags & SAMPLES)
        rows, slots = plan.num_rows, plan.slots[sampling]
        if len(sampling) and not self._state.rows(slots).plain:
            logits = output.logits.index_select(0, to_device(place, self._device))
            sampled = self._sampler.sample(logits, slots, plan.output_lens[sampling])
            return self._pending(rows, sampling, slots, sampled, [])
        drawn = Download(output.tokens)
        return PendingStep(lambda: _scatter(rows, sampling, drawn.wait()[place, None], None, []))

    def _before_graph(self) -> None:
        """What is captured cannot wait for pages layer by layer."""
        if self._cache is not None:
            self._cache.wait_layers()

    def _wants_prompt_logprobs(self, plan: PlanView) -> bool:
        return bool(len(self._state.wanting_prompt_logprobs(plan.slots[: plan.num_extend_rows])))

    def _pending(
        self,
        rows: int,
        sampling: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int32],
        sampled: SampleResult,
        prompt_logprobs: list[PromptLogprobs],
    ) -> PendingStep:
        """Keep the tokens for the next step on the device, and send them to the host."""
        # A bad row's -1 must not become an input id of a plan that is already made.
        if self._device.type == "cpu":
            values = sampled.tokens.numpy()
            self.last_tokens.numpy()[slots] = np.maximum(values[:, -1], 0)
            return PendingStep(result=_scatter(rows, sampling, values, sampled, prompt_logprobs))
        where = to_device(slots.astype(np.int64), self._device)
        self.last_tokens.index_copy_(0, where, sampled.tokens[:, -1].clamp_min(0))
        drawn = Download(sampled.tokens)

        def finish() -> StepResult:
            return _scatter(rows, sampling, drawn.wait(), sampled, prompt_logprobs)

        return PendingStep(finish)

    def _prompt_logprobs(self, plan: PlanView, hidden: torch.Tensor) -> list[PromptLogprobs]:
        """The logits after position i tell of prompt token i + 1. Every rank comes here alike: logits may be a collective."""
        pieces: list[PromptLogprobs] = []
        extends = plan.num_extend_rows
        wanted = set(self._state.wanting_prompt_logprobs(plan.slots[:extends]).tolist()) if extends else set()
        for row in sorted(wanted):
            slot, context, length = int(plan.slots[row]), int(plan.context_lens[row]), int(plan.query_lens[row])
            prompt = self._state.prompt(slot)
            count = min(length, len(prompt) - 1 - context)
            if count <= 0:
                continue
            start = int(plan.query_lens[:row].sum())
            top = self._state.prompt_logprobs(slot)
            for offset in range(0, count, _PROMPT_LOGITS):
                size = min(_PROMPT_LOGITS, count - offset)
                logits = self._model.logits(hidden[start + offset : start + offset + size]).float()
                first = context + offset + 1
                targets = to_device(prompt[first : first + size].astype(np.int64), self._device)
                pieces.append(
                    PromptLogprobs(row=row, first=first, top=top, values=gather_logprobs(logits, targets, top))
                )
        return pieces


def _nothing(rows: int, prompt_logprobs: list[PromptLogprobs]) -> StepResult:
    return StepResult(
        tokens=np.full((rows, 1), -1, dtype=np.int32),
        counts=np.zeros(rows, dtype=np.int32),
        bad=np.zeros(rows, dtype=np.bool_),
        prompt_logprobs=prompt_logprobs,
    )


def _scatter(
    rows: int,
    sampling: npt.NDArray[np.int64],
    drawn: npt.NDArray[np.int64],
    sampled: SampleResult | None,
    prompt_logprobs: list[PromptLogprobs],
) -> StepResult:
    """Spread the sampling rows' tokens (n, W) over all rows of the plan. A row with -1 for its last token is bad."""
    tokens = np.full((rows, drawn.shape[1]), -1, dtype=np.int32)
    counts = np.zeros(rows, dtype=np.int32)
    bad = np.zeros(rows, dtype=np.bool_)
    tokens[sampling], counts[sampling], bad[sampling] = drawn, 1, drawn[:, -1] < 0
    if sampled is None:
        return StepResult(tokens=tokens, counts=counts, bad=bad)
    return StepResult(
        tokens=tokens,
        counts=counts,
        bad=bad,
        faults={int(sampling[row]): text for row, text in sampled.faults.items()},
        logprobs=sampled.logprobs,
        logprob_rows=None if sampled.logprob_rows is None else sampling[sampled.logprob_rows],
        top=sampled.top,
        prompt_logprobs=prompt_logprobs,
    )

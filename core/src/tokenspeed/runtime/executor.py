"""Runs a plan on this rank: page tables, batch, model, sampler; answers with flat host arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.interfaces.model import CausalLM
from tokenspeed.runtime.batch import BatchBuilder
from tokenspeed.runtime.forward import Forward
from tokenspeed.runtime.logprobs import LogprobRows, gather_logprobs
from tokenspeed.runtime.page_tables import PageTables
from tokenspeed.runtime.plan import SAMPLES, PlanView, SlotRequest
from tokenspeed.runtime.sampler import Sampler, SampleResult
from tokenspeed.runtime.slot_sampling import SlotSampling

__all__ = ["ModelExecutor", "PromptLogprobs", "StepResult"]

Int32 = npt.NDArray[np.int32]

#: Prompt tokens whose logits are held at once: 256 rows of a 150k vocabulary are 150 MB in fp32.
_PROMPT_LOGITS = 256


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """Log probabilities of prompt tokens ``first``, ``first + 1``, ... of the request in plan row ``row``; ``top`` alternatives each."""

    row: int
    first: int
    top: int
    values: LogprobRows


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a plan yielded, aligned with its rows.

    Attributes:
        tokens: (rows, W) int32; -1 where a row yields none.
        counts: (rows) int32, tokens of each row that count.
        bad: (rows) bool, rows whose logits were not numbers.
        logprobs: of output tokens, for plan rows ``logprob_rows`` (m) int64 with ``top`` (m) alternatives each.
        prompt_logprobs: pieces of prompts, one per row that asked and computed some.
    """

    tokens: Int32
    counts: Int32
    bad: npt.NDArray[np.bool_]
    logprobs: LogprobRows | None = None
    logprob_rows: npt.NDArray[np.int64] | None = None
    top: npt.NDArray[np.int64] | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


class ModelExecutor:
    """State of one rank that persists between steps: page tables, input buffers, last tokens, sampling parameters by slot.

    Args:
        model: gives logits; ``forward`` runs it over a batch.
        argmax: kernel ``sampling.argmax``.
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
        self._last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._builder = BatchBuilder(
            max_rows=max_rows,
            max_tokens=max_tokens,
            page_sizes=page_sizes,
            tables=tables,
            last_tokens=self._last_tokens,
            device=device,
        )

    @torch.inference_mode()
    def execute(self, plan: PlanView, new: Sequence[SlotRequest] = ()) -> StepResult:
        """Run one plan; ``new`` holds a ``SlotRequest`` for each row that carries ``NEW_IN_SLOT``."""
        for request in new:
            self._state.load(request)
        self._tables.apply(plan.delta_group, plan.delta_slot, plan.delta_index, plan.delta_page)
        batch = self._builder.build(plan)
        sampling = np.flatnonzero(plan.flags & SAMPLES)
        last = batch.query_start[1:].to(torch.int64) - 1
        batch.output_index = (
            last if len(sampling) == plan.num_rows else last[torch.from_numpy(sampling).to(self._device)]
        )
        hidden = self._forward(batch)
        prompt_logprobs = self._prompt_logprobs(plan, hidden)
        if not len(sampling):
            return _nothing(plan.num_rows, prompt_logprobs)
        logits = self._model.logits(
            hidden if batch.num_tokens == len(sampling) else hidden.index_select(0, batch.output_index)
        )
        slots = plan.slots[sampling]
        sampled = self._sampler.sample(logits, slots, plan.output_lens[sampling])
        # A bad row's -1 must not become an input id of a plan that is already made.
        where = torch.from_numpy(slots.astype(np.int64)).to(self._device)
        self._last_tokens.index_copy_(0, where, sampled.tokens[:, -1].clamp_min(0))
        return _scatter(plan.num_rows, sampling, sampled, prompt_logprobs)

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
                targets = torch.from_numpy(prompt[first : first + size].astype(np.int64)).to(self._device)
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
    rows: int, sampling: npt.NDArray[np.int64], sampled: SampleResult, prompt_logprobs: list[PromptLogprobs]
) -> StepResult:
    """Spread the sampling rows' results over all rows of the plan."""
    drawn = sampled.tokens.to("cpu", torch.int32).numpy()
    tokens = np.full((rows, drawn.shape[1]), -1, dtype=np.int32)
    counts = np.zeros(rows, dtype=np.int32)
    bad = np.zeros(rows, dtype=np.bool_)
    tokens[sampling], counts[sampling], bad[sampling] = drawn, sampled.accepted.cpu().numpy(), sampled.bad.cpu().numpy()
    return StepResult(
        tokens=tokens,
        counts=counts,
        bad=bad,
        logprobs=sampled.logprobs,
        logprob_rows=None if sampled.logprob_rows is None else sampling[sampled.logprob_rows],
        top=sampled.top,
        prompt_logprobs=prompt_logprobs,
    )

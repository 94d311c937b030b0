"""Runs made-up steps before the engine is ready: whatever is compiled, loaded or allocated on first use is there when requests come, and the memory that the
largest step takes is known before the KV pool gets what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tokenspeed.messages.to_engine import SamplingParams
from tokenspeed.runtime.executor import ModelExecutor
from tokenspeed.runtime.plan import SAMPLES, PlanArrays, SlotRequest

__all__ = ["largest_plan", "made_up_plan", "warm_up"]

#: Tokens before the first prompt of the largest step: what backends gather for a prompt grows with them, and so does the time of that step.
_CONTEXT = 32768

#: Tokens before a short prompt for which backends take their kernels for long contexts.
_FAR = 200


def made_up_plan(extends: Sequence[int], decodes: int = 0, *, context: int = 0) -> PlanArrays:
    """A plan of prompts of ``extends`` tokens, the first of them after ``context`` others, and ``decodes`` rows after them.

    They are in slots 0, 1, ... whose page tables are still zero: all write to page 0.
    """
    rows, none = len(extends) + decodes, np.zeros(0, dtype=np.int32)
    query_lens = np.array([*extends, *[1] * decodes], dtype=np.int32)
    context_lens = np.zeros(rows, dtype=np.int32)
    context_lens[0] = context
    return PlanArrays(
        num_rows=rows,
        num_extend_rows=len(extends),
        num_tokens=int(query_lens.sum()),
        slots=np.arange(rows, dtype=np.int32),
        context_lens=context_lens,
        query_lens=query_lens,
        input_ids=np.zeros(int(query_lens.sum()), dtype=np.int32),
        flags=np.full(rows, SAMPLES, dtype=np.int32),
        output_lens=np.zeros(rows, dtype=np.int32),
        delta_group=none,
        delta_slot=none,
        delta_index=none,
        delta_page=none,
        prefix_intervals=np.zeros((0, 4), dtype=np.int32),
    )


def largest_plan(max_rows: int, max_tokens: int, max_model_len: int) -> PlanArrays:
    """The step that takes the most memory: as many tokens as a step has, in as many rows, all of which sample.

    Its prompts are as long as they may be, the first of them after a context; the other rows decode.
    """
    prompts = min(max_rows, -(-max_tokens // max_model_len))
    decodes = max(0, min(max_rows - prompts, max_tokens - prompts))
    tokens = min(max_tokens - decodes, prompts * max_model_len)
    lengths = [tokens // prompts + (number < tokens % prompts) for number in range(prompts)]
    return made_up_plan(lengths, decodes, context=min(max_model_len - lengths[0], _CONTEXT))


def warm_up(executor: ModelExecutor, *, max_rows: int, max_tokens: int, max_model_len: int) -> int:
    """Steps of many shapes: single tokens, each side of the borders between kernels (powers of two up to 256), mixed ones, a short prompt after a long context,
    random draws, and the largest step with every way of drawing in each of its rows. The first one also runs what zeroes and copies states, on none.

    Returns:
        Steps that were run.
    """
    longest = min(max_tokens, max_model_len)
    sizes = {1, 2, 3} | {size + more for size in (4, 8, 16, 32, 64, 128, 256) for more in (0, 1)}
    plans = [made_up_plan([size]) for size in sorted(sizes) if size <= longest]
    plans[0] = _moving_no_state(plans[0], executor.state_groups)
    if max_rows >= 2 and longest >= 4:
        plans += [
            made_up_plan([3], decodes)
            for decodes in (1, 2, 5, 16, 33)
            if decodes < max_rows and decodes + 3 <= max_tokens
        ]
        plans.append(made_up_plan([2, 1]))
    if longest >= 2 and max_model_len >= _FAR + 2:
        plans.append(made_up_plan([2], context=_FAR))
    for plan in plans:
        executor.execute(plan).result()
    for bias in ((), ((0, 0.0),)):  # draws from logits as the model gives them, and from adjusted ones
        executor.execute(made_up_plan([1]), [_request(0, logit_bias=bias)]).result()
    largest = largest_plan(max_rows, max_tokens, max_model_len)
    asking = [_request(slot, presence_penalty=0.1, logprobs=1) for slot in largest.slots.tolist()]
    executor.execute(largest, asking).result()
    return len(plans) + 3


def _moving_no_state(plan: PlanArrays, groups: Sequence[int]) -> PlanArrays:
    """``plan``, and for each of ``groups`` a state -1 (none) that becomes zero, and one that becomes a copy."""
    kinds, numbers = (np.array(each, dtype=np.int32) for each in ([0, 1] * len(groups), np.repeat(groups, 2)))
    none = np.full(len(kinds), -1, dtype=np.int32)
    return replace(plan, state_kind=kinds, state_group=numbers, state_source=none, state_target=none)


def _request(slot: int, **params: Any) -> SlotRequest:
    drawn = SamplingParams(max_new_tokens=1, temperature=1.0, **params)
    return SlotRequest(slot=slot, params=drawn, seed=0, end_ids=(), prompt=bytes(4))

"""Runs made-up steps before the engine is ready, so that whatever is compiled, loaded or allocated on first use is there when requests come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenspeed.messages.to_engine import SamplingParams
from tokenspeed.runtime.executor import ModelExecutor
from tokenspeed.runtime.plan import SAMPLES, PlanArrays, SlotRequest

__all__ = ["made_up_plan", "warm_up"]


def made_up_plan(extends: Sequence[int], decodes: int = 0) -> PlanArrays:
    """A plan of prompts of ``extends`` tokens and ``decodes`` rows after them, in slots 0, 1, ... whose page tables are still zero: all write to page 0."""
    rows, none = len(extends) + decodes, np.zeros(0, dtype=np.int32)
    query_lens = np.array([*extends, *[1] * decodes], dtype=np.int32)
    return PlanArrays(
        num_rows=rows,
        num_extend_rows=len(extends),
        num_tokens=int(query_lens.sum()),
        slots=np.arange(rows, dtype=np.int32),
        context_lens=np.zeros(rows, dtype=np.int32),
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


def warm_up(executor: ModelExecutor, *, max_rows: int, max_tokens: int, max_model_len: int) -> int:
    """Steps of many shapes: single tokens, each side of the borders between kernels (powers of two up to 256), the largest step, mixed ones, random draws.

    Returns:
        Steps that were run.
    """
    longest = min(max_tokens, max_model_len)
    sizes = {1, 2, 3, longest} | {size + more for size in (4, 8, 16, 32, 64, 128, 256) for more in (0, 1)}
    plans = [made_up_plan([size]) for size in sorted(sizes) if size <= longest]
    if max_rows >= 2 and longest >= 4:
        plans += [
            made_up_plan([3], decodes)
            for decodes in (1, 2, 5, 16, 33)
            if decodes < max_rows and decodes + 3 <= max_tokens
        ]
        plans.append(made_up_plan([2, 1]))
    for plan in plans:
        executor.execute(plan).result()
    for bias in ((), ((0, 0.0),)):  # draws from logits as the model gives them, and from adjusted ones
        request = SlotRequest(
            slot=0, params=SamplingParams(temperature=1.0, logit_bias=bias), seed=0, end_ids=(), prompt=b""
        )
        executor.execute(made_up_plan([1]), [request]).result()
    return len(plans) + 2

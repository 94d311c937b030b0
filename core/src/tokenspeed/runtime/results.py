"""What a step yields, and the promise of it while the device still works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tokenspeed.runtime.logprobs import LogprobRows

__all__ = ["PendingStep", "PromptLogprobs", "StepResult"]

Int32 = npt.NDArray[np.int32]


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
        bad: (rows) bool, rows whose logits were not numbers, or that cannot go on for what ``faults`` says of them.
        logprobs: of output tokens, for plan rows ``logprob_rows`` (m) int64 with ``top`` (m) alternatives each.
        prompt_logprobs: pieces of prompts, one per row that asked and computed some.
    """

    tokens: Int32
    counts: Int32
    bad: npt.NDArray[np.bool_]
    faults: dict[int, str] = field(default_factory=dict)
    logprobs: LogprobRows | None = None
    logprob_rows: npt.NDArray[np.int64] | None = None
    top: npt.NDArray[np.int64] | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


class PendingStep:
    """A step that was queued.

    Args:
        finish: waits for the device and makes the result; called once at most.
        result: the result where it is there already.
    """

    def __init__(self, finish: Callable[[], StepResult] | None = None, *, result: StepResult | None = None) -> None:
        self._finish = finish
        self._result = result

    @property
    def done(self) -> bool:
        """Whether ``result`` returns without waiting for anyone."""
        return self._result is not None

    def result(self) -> StepResult:
        """The result; waits for the device the first time."""
        if self._result is None:
            assert self._finish is not None, "a step has a result or a way to get it"
            self._result, self._finish = self._finish(), None
        return self._result

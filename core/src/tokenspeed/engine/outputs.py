"""From a step's arrays to what clients are told: end tokens, log probabilities, finishes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenspeed.engine.requests import LiveRequest
from tokenspeed.messages import TokenLogprobs, TokenOutput
from tokenspeed.runtime.logprobs import LogprobRows
from tokenspeed.runtime.results import PromptLogprobs, StepResult
from tokenspeed.types import FinishReason

__all__ = [
    "OUTCOME_CONTINUE",
    "OUTCOME_FAIL",
    "OUTCOME_FINISH",
    "OUTCOME_RELOAD",
    "REASONS",
    "Judgement",
    "judge",
    "output_of",
    "take_prompt_logprobs",
]

OUTCOME_CONTINUE, OUTCOME_FINISH, OUTCOME_FAIL, OUTCOME_RELOAD = 0, 1, 2, 3

#: The scheduler's finish reasons as clients know them.
REASONS: Mapping[int, FinishReason] = {
    1: FinishReason.STOP,
    2: FinishReason.LENGTH,
    3: FinishReason.ERROR,
    4: FinishReason.ABORT,
}

_BAD_LOGITS = "the model produced numbers that are not finite for this request; other requests are not affected"


@dataclass(slots=True)
class Judgement:
    """What one row's tokens mean for its request.

    Attributes:
        tokens: the row's tokens up to the one that ends the request, which is included.
        ended_by: that token where the request asked for it in ``stop_token_ids``.
        bad: its logits were not numbers; ``fault`` where it is something else.
    """

    row: int
    request: LiveRequest
    tokens: list[int]
    ended_by: int | None = None
    bad: bool = False
    fault: str = ""


def judge(
    requests: list[LiveRequest | None], result: StepResult
) -> tuple[list[Judgement], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Find end tokens and bad rows; appends the tokens to their requests.

    Args:
        requests: by row; ``None`` where the request has ended meanwhile.

    Returns:
        Judgements of rows that yielded something, the counts (rows) cut at end tokens, and the outcomes (rows) for the scheduler.
    """
    counts = result.counts.copy()
    outcomes = np.zeros(len(counts), dtype=np.int32)
    judgements = []
    bad = set(np.flatnonzero(result.bad).tolist()) if result.bad.any() else ()
    for row, (request, count, drawn) in enumerate(zip(requests, counts.tolist(), result.tokens.tolist(), strict=True)):
        if request is None or not count:
            continue
        if row in bad:
            counts[row], outcomes[row] = 0, OUTCOME_FAIL
            judgements.append(Judgement(row, request, [], bad=True, fault=result.faults.get(row, "")))
            continue
        tokens = drawn[:count]
        judgement = Judgement(row, request, tokens)
        for at, token in enumerate(tokens):
            if token in request.end_ids:
                counts[row], outcomes[row] = at + 1, OUTCOME_FINISH
                judgement.tokens = tokens[: at + 1]
                judgement.ended_by = token if token in request.params.stop_token_ids else None
                break
        request.output += judgement.tokens
        judgements.append(judgement)
    return judgements, counts, outcomes


def output_of(
    judgement: Judgement, finish: FinishReason | None, logprobs: list[TokenLogprobs] | None, now_us: int
) -> TokenOutput:
    """The message for one row; ``finish`` is set where the request ended with it."""
    request = judgement.request
    first = not request.first_token_us
    if first:
        request.first_token_us = now_us
    prompt_logprobs = None
    if request.prompt_logprobs is not None and not judgement.bad:
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    return TokenOutput(
        rid=request.rid,
        tokens=judgement.tokens,
        finish=finish.value if finish is not None else "",
        stop_reason=judgement.ended_by if finish is FinishReason.STOP else None,
        cached_tokens=request.cached_tokens if first else -1,
        logprobs=logprobs if not judgement.bad else None,
        prompt_logprobs=prompt_logprobs,
        stats=request.stats(now_us) if finish is not None else None,
        error=(judgement.fault or _BAD_LOGITS) if judgement.bad else "",
    )


def take_prompt_logprobs(requests: list[LiveRequest | None], pieces: Iterable[PromptLogprobs]) -> None:
    """File pieces of prompts with their requests. A piece computed again after a retraction replaces the former one."""
    for piece in pieces:
        request = requests[piece.row]
        if request is None or request.prompt_logprobs is None:
            continue
        entries = token_logprobs(piece.values, [piece.top] * len(piece.values.chosen))
        request.prompt_logprobs[piece.first : piece.first + len(entries)] = entries


def token_logprobs(values: LogprobRows, tops: list[int]) -> list[TokenLogprobs]:
    """Messages of n tokens; ``tops`` (n) is how many alternatives each gets."""
    columns = zip(
        values.chosen.tolist(), values.rank.tolist(), values.top_ids.tolist(), values.top.tolist(), tops, strict=True
    )
    return [TokenLogprobs(chosen, rank, ids[:top], best[:top]) for chosen, rank, ids, best, top in columns]

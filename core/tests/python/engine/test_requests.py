"""Admission gives each request a seed, end tokens and a clean record of its costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tokenspeed.engine.process import failure_of
from tokenspeed.engine.requests import Admission, LiveRequest
from tokenspeed.errors import ConfigError, EngineError, ModelError, PluginError
from tokenspeed.messages import GenerateRequest, SamplingParams


def admit(admission: Admission, **params: Any) -> LiveRequest:
    tokens = np.arange(5, dtype="<i4").tobytes()
    return admission.admit(GenerateRequest(1, tokens, SamplingParams(4, **params), 0.0), now_us=1000)


@pytest.mark.parametrize(
    ("arrival_s", "expected"),
    [(0.0004, 400), (0.001, 1000), (0.0, 1000), (5.0, 1000), (-1.0, 1000), (float("nan"), 1000), (float("inf"), 1000)],
)
def test_times_count_from_the_arrival_in_the_server(arrival_s: float, expected: int) -> None:
    """The wait in the socket belongs to the queue; a time that cannot be one counts as now."""
    tokens = np.arange(5, dtype="<i4").tobytes()
    request = admission().admit(GenerateRequest(1, tokens, SamplingParams(4), arrival_s), now_us=1000)
    assert request.arrival_us == expected


def admission(seed: int = 0) -> Admission:
    return Admission(vocab_size=50, end_ids=[2, 3], seed=seed)


def test_requests_without_a_seed_draw_different_ones_that_the_servers_seed_repeats() -> None:
    one, two, other = admission(), admission(), admission(seed=1)
    first = [admit(one).seed for _ in range(3)]
    assert first == [admit(two).seed for _ in range(3)]
    assert len(set(first)) == 3
    assert first[0] != admit(other).seed


@pytest.mark.parametrize(
    ("seed", "expected"), [(0, 0), (-1, -1), (2**63, -(2**63)), (2**64 + 5, 5), (-(2**63) - 1, 2**63 - 1)]
)
def test_any_integer_is_a_seed(seed: int, expected: int) -> None:
    assert admit(admission(), seed=seed).seed == expected


def test_end_tokens_are_the_models_and_the_requests_own() -> None:
    assert admit(admission(), stop_token_ids=(7,)).end_ids == {2, 3, 7}
    assert admit(admission(), stop_token_ids=(7,), ignore_eos=True).end_ids == {7}
    assert admit(admission(), ignore_eos=True).end_ids == set()


def test_log_probabilities_of_a_prompt_that_were_sent_are_not_computed_again() -> None:
    """E24: a request that comes back after a retraction computes its prompt anew, but nobody waits for those any more."""
    request = admit(admission(), prompt_logprobs=2, logprobs=1)
    assert request.enter_slot(0, 0, now_us=2000).params == request.params
    request.retract(3000)
    assert request.enter_slot(1, 0, now_us=4000).params.prompt_logprobs == 2  # retracted before they were all there
    request.prompt_logprobs = None
    request.retract(5000)
    again = request.enter_slot(1, 0, now_us=6000).params
    assert (again.prompt_logprobs, again.logprobs) == (-1, 1)


def test_preemptions_are_counted_and_hits_only_at_the_first_admission() -> None:
    """ops-07: a request that is admitted again finds more than its prompt in the cache; that is no hit of the prompt."""
    request = admit(admission())
    request.enter_slot(3, 4, now_us=3000)
    request.output += [8, 9]
    request.first_token_us = 5000
    request.retract(6000)
    again = request.enter_slot(1, 6, now_us=9000)
    assert again.output == np.array([8, 9], dtype="<i4").tobytes()
    stats = request.stats(11_000)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (5, 4, 2)
    assert (stats.preemptions, stats.preempted_ms) == (1, 3.0)
    assert (stats.queue_ms, stats.prefill_ms, stats.ttft_ms, stats.total_ms) == (2.0, 2.0, 4.0, 10.0)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigError("flag"), "config", "flag"),
        (PluginError("plugin"), "plugin", "plugin"),
        (ModelError("weights"), "model", "weights"),
        (EngineError("gone"), "internal", "gone"),
        (ZeroDivisionError("by zero"), "internal", "ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), "internal", "KeyboardInterrupt: "),
    ],
)
def test_failures_are_told_by_kind(error: BaseException, kind: str, text: str) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.error) == (kind, text)

"""From requests to outputs: the same tokens on every way through the scheduler, and each request ends once, rightly."""

from __future__ import annotations

import numpy as np
import pytest

from tokenspeed.messages import AbortRequest, GenerateRequest, SamplingParams, StopRequest

PROMPTS = [[(i * 37 + j * 11) % 900 for j in range(3 + 7 * i)] for i in range(12)]
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["stepwise", "overlapped"])


def check_all(rig, expected, count=12, prompts=PROMPTS):
    for rid, prompt in enumerate(prompts):
        assert rig.tokens(rid) == expected(prompt, count), rid
        assert rig.last(rid).finish == "length"


@OVERLAP
@pytest.mark.parametrize("budget", [8, 64])
def test_requests_sent_together_get_their_own_tokens(make_rig, expected, overlap, budget):
    rig = make_rig(overlap=overlap, budget=budget, pages=200)
    for rid, prompt in enumerate(PROMPTS):
        rig.add(rid, prompt, max_new_tokens=12)
    rig.run()
    check_all(rig, expected)


@OVERLAP
def test_tokens_survive_retractions(make_rig, expected, overlap):
    rig = make_rig(overlap=overlap, pages=40, max_model_len=150)
    for rid in range(100, 140):  # short answers teach admission to expect short ones
        rig.add(rid, [rid, rid + 1, rid + 2], max_new_tokens=2)
        rig.run()
    for rid, prompt in enumerate(PROMPTS):
        rig.add(rid, prompt, max_new_tokens=50)
    rig.run()
    check_all(rig, expected, 50)
    ends = [rig.last(rid).stats for rid in range(len(PROMPTS))]
    assert sum(stats.preemptions for stats in ends) > 0
    assert rig.gauges.now().retractions == sum(stats.preemptions for stats in ends)
    assert all(stats.cached_tokens <= stats.prompt_tokens for stats in ends)


@OVERLAP
def test_a_warm_prefix_changes_no_token_and_is_reported(make_rig, expected, overlap):
    rig = make_rig(overlap=overlap)
    prompt = PROMPTS[6]
    for rid in range(2):
        rig.add(rid, prompt)
        rig.run()
        assert rig.tokens(rid) == expected(prompt, 8)
    assert rig.outputs[0][0].cached_tokens == 0
    hit = (len(prompt) - 1) // 4 * 4
    assert rig.outputs[1][0].cached_tokens == rig.last(1).stats.cached_tokens == hit


@OVERLAP
def test_an_end_token_finishes_the_request_and_is_the_last_token(make_rig, expected, overlap):
    tokens = expected(PROMPTS[2], 8)
    rig = make_rig(overlap=overlap, end_ids=[tokens[3]])
    rig.add(0, PROMPTS[2])
    rig.add(1, PROMPTS[2], ignore_eos=True)
    rig.add(2, PROMPTS[2], ignore_eos=True, stop_token_ids=(tokens[5],))
    rig.add(3, PROMPTS[2], min_tokens=5)
    rig.run()
    assert rig.tokens(0) == tokens[:4]
    assert (rig.last(0).finish, rig.last(0).stop_reason) == ("stop", None)
    assert rig.tokens(1) == tokens
    assert rig.last(1).finish == "length"
    assert rig.tokens(2) == tokens[:6]
    assert (rig.last(2).finish, rig.last(2).stop_reason) == ("stop", tokens[5])
    assert rig.tokens(3)[:3] == tokens[:3]
    assert rig.tokens(3)[3] != tokens[3]


@OVERLAP
def test_an_abort_ends_a_request_in_any_state_and_frees_its_pages(make_rig, overlap):
    for steps in range(5):
        rig = make_rig(overlap=overlap, budget=16)
        rig.add(0, PROMPTS[5])  # more than one chunk
        rig.add(1, PROMPTS[1])
        for _ in range(steps):
            rig.turn()
        rig.send(AbortRequest(0))
        rig.turn()
        assert rig.last(0).finish == "abort"
        rig.run()
        assert rig.last(0).finish == "abort"
        assert rig.last(1).finish == "length"
        stats = rig.gauges.now()
        assert (stats.running, stats.waiting, stats.pages_active) == (0, 0, 0)
        assert (stats.aborted, stats.finished) == (1, 1)


@OVERLAP
def test_a_stop_from_the_server_ends_in_good_order_and_keeps_pages_for_the_next_turn(make_rig, overlap):
    rig = make_rig(overlap=overlap)
    rig.add(0, PROMPTS[5], max_new_tokens=100)
    for _ in range(6):
        rig.turn()
    rig.send(StopRequest(0))
    rig.run()
    assert rig.last(0).finish == "stop"
    assert rig.gauges.now().aborted == 0
    assert rig.gauges.now().finished == 1
    assert (rig.scheduler.stats().finished, rig.scheduler.stats().aborted) == (1, 0)  # E10
    rig.add(1, PROMPTS[5] + rig.tokens(0))
    rig.run()
    assert rig.outputs[1][0].cached_tokens >= len(PROMPTS[5]) // 4 * 4


def test_messages_about_unknown_requests_change_nothing(make_rig, expected):
    rig = make_rig()
    rig.add(0, PROMPTS[0])
    rig.send(AbortRequest(99))
    rig.send(StopRequest(98))
    rig.run()
    rig.send(AbortRequest(0))
    rig.run()
    assert rig.tokens(0) == expected(PROMPTS[0], 8)
    assert list(rig.outputs) == [0]


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], {}, "no token"),
        ([1, 997], {}, "997"),
        ([-1], {}, "-1"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens"),
        ([5], {"stop_token_ids": (2000,)}, "stop_token_ids"),
        ([5], {"logit_bias": ((-7, 1.0),)}, "logit_bias"),
        ([5] * 500, {}, ""),
        ([5], {"max_new_tokens": 2**63}, "max_new_tokens"),
        ([5], {"top_k": 2**64 - 1}, "top_k"),
        ([5], {"min_tokens": -(2**63)}, "min_tokens"),
        ([5], {"priority": 2**40}, "priority"),
    ],
)
def test_a_request_that_cannot_run_is_refused_alone_with_a_reason(make_rig, expected, prompt, params, says):
    rig = make_rig()
    rig.add(0, PROMPTS[0])
    rig.add(1, prompt, **params)
    rig.add(2, PROMPTS[1])
    rig.run()
    assert rig.last(1).finish == "error"
    assert rig.last(1).error
    assert rig.last(1).param
    assert says in rig.last(1).error
    assert rig.tokens(0) == expected(PROMPTS[0], 8)
    assert rig.tokens(2) == expected(PROMPTS[1], 8)


def test_a_prompt_of_broken_bytes_is_refused(make_rig):
    rig = make_rig()
    rig.send(GenerateRequest(0, b"abc", SamplingParams(4), 0.0))
    rig.run()
    assert "bytes" in rig.last(0).error


def test_a_second_live_request_of_the_same_number_is_ignored(make_rig, expected):
    rig = make_rig()
    rig.add(0, PROMPTS[0])
    rig.add(0, PROMPTS[1])
    rig.run()
    assert rig.tokens(0) == expected(PROMPTS[0], 8)
    assert rig.last(0).finish == "length"


@OVERLAP
@pytest.mark.parametrize("logprobs", [-1, 2])
def test_not_a_number_ends_that_request_with_an_error_and_no_other(make_rig, expected, overlap, logprobs):
    """kv-24: NaN in one row at its second step."""
    poison = expected(PROMPTS[1], 2)[0]
    rig = make_rig(overlap=overlap, poison=poison)
    for rid in range(3):
        rig.add(rid, PROMPTS[rid], logprobs=logprobs)
    rig.run()
    assert rig.last(1).finish == "error"
    assert "not finite" in rig.last(1).error
    assert rig.tokens(1) == [poison]
    for rid in (0, 2):
        assert rig.tokens(rid) == expected(PROMPTS[rid], 8)
    assert rig.gauges.now().failed == 1
    assert rig.gauges.now().running == 0


@OVERLAP
def test_smaller_priority_numbers_are_served_first(make_rig, overlap):
    rig = make_rig(overlap=overlap, max_num_seqs=1)
    rig.add(0, PROMPTS[0], max_new_tokens=3)
    rig.turn()
    rig.add(1, PROMPTS[1], priority=5, max_new_tokens=3)
    rig.add(2, PROMPTS[2], priority=-5, max_new_tokens=3)
    rig.run()
    assert list(rig.outputs) == [0, 2, 1]


@OVERLAP
def test_log_probabilities_come_with_each_token_and_once_for_the_prompt(make_rig, overlap):
    prompt = PROMPTS[4]
    rig = make_rig(overlap=overlap, budget=8)
    rig.add(9, prompt)  # warms the cache, which prompt log probabilities must not use
    rig.run()
    rig.add(0, prompt, logprobs=2, prompt_logprobs=1)
    rig.run()
    first, *rest = rig.outputs[0]
    assert len(first.prompt_logprobs) == len(prompt)
    assert first.prompt_logprobs[0] is None
    assert all(entry is not None and len(entry.top_ids) == 1 for entry in first.prompt_logprobs[1:])
    assert first.cached_tokens == 0
    assert all(item.prompt_logprobs is None for item in rest)
    for item in rig.outputs[0]:
        assert [entry.rank for entry in item.logprobs] == [1] * len(item.tokens)
        assert item.logprobs[0].top_ids[0] == item.tokens[0]
        assert item.logprobs[0].top_logprobs[0] == item.logprobs[0].logprob
        assert np.isfinite(item.logprobs[0].logprob)


def test_times_of_a_request_add_up(make_rig):
    ticks = iter(range(0, 10**9, 1000))
    rig = make_rig(clock=lambda: next(ticks), budget=8)
    rig.add(0, PROMPTS[4])
    rig.run()
    stats = rig.last(0).stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (len(PROMPTS[4]), 0, 8)
    assert stats.ttft_ms == pytest.approx(stats.queue_ms + stats.prefill_ms)
    assert 0 < stats.queue_ms < stats.ttft_ms < stats.total_ms
    assert stats.decode_tok_s == pytest.approx(7 / ((stats.total_ms - stats.ttft_ms) / 1000))


def test_figures_are_sent_rarely_and_once_more_when_the_engine_goes_idle(make_rig):
    """ops-06: gauges reach their idle values even if every request was aborted."""
    now = [0]
    rig = make_rig(clock=lambda: now[0])
    rig.add(0, PROMPTS[0], max_new_tokens=100)
    for _ in range(20):
        rig.turn()
        now[0] += 30_000
    assert 5 <= len(rig.stats) <= 7
    rig.send(AbortRequest(0))
    rig.run()
    assert (rig.stats[-1].running, rig.stats[-1].aborted, rig.stats[-1].pages_active) == (0, 1, 0)
    sent = len(rig.stats)
    for _ in range(5):
        now[0] += 200_000
        rig.ask("stats")  # the server's heartbeat is answered and causes nothing else
    assert len(rig.stats) == sent


def test_control_requests_are_answered(make_rig):
    rig = make_rig()
    rig.add(0, PROMPTS[5])
    rig.run()
    assert rig.ask("stats").result.finished == 1
    assert rig.ask("info").result.vocab_size == 997
    assert rig.ask("flush_cache").result > 0
    assert rig.ask("stats").result.pages_cached == 0
    unknown = rig.ask("explode")
    assert not unknown.ok
    assert "flush_cache" in unknown.result


def test_shutdown_ends_the_loop_and_tells_who_still_lives(make_rig):
    rig = make_rig()
    rig.add(0, PROMPTS[0], max_new_tokens=100)
    rig.turn()
    from tokenspeed.messages import ControlRequest

    rig.send(ControlRequest(3, "shutdown"))
    rig.loop.run()
    messages = list(rig.channel.from_engine)
    assert any(getattr(m, "id", None) == 3 and m.ok for m in messages)
    assert messages[-1].items[-1].finish == "abort"


def test_the_same_seed_gives_the_same_tokens_whatever_the_batch(make_rig):
    """Alone, among others, in chunks, after retractions, overlapped."""
    seen = set()
    for options, others in [
        ({}, 0),
        ({"overlap": True}, 5),
        ({"budget": 8}, 7),
        ({"pages": 30, "max_model_len": 116}, 9),
    ]:
        rig = make_rig(**options)
        for rid in range(200, 240 if "pages" in options else 200):  # as above: leads to retractions
            rig.add(rid, [rid, rid + 1], max_new_tokens=2)
            rig.run()
        for rid in range(others):
            rig.add(rid, PROMPTS[rid], max_new_tokens=40, temperature=1.0)
        rig.add(100, PROMPTS[3], max_new_tokens=40, temperature=3.0, seed=12345, frequency_penalty=0.2)
        rig.run()
        seen.add(tuple(rig.tokens(100)))
        assert ("pages" in options) == (rig.gauges.now().retractions > 0)
    assert len(seen) == 1


def test_a_step_that_raises_ends_the_loop_loudly(make_rig):
    rig = make_rig()
    rig.add(0, PROMPTS[0])
    rig.turn()

    def broken(*_):
        raise RuntimeError("the device is lost")

    rig.executor.execute = broken
    with pytest.raises(RuntimeError, match="the device is lost"):
        rig.loop.run()


@OVERLAP
def test_the_models_length_ends_a_request_with_its_tokens_kept(make_rig, expected, overlap):
    prompt = [i % 800 for i in range(190)]
    rig = make_rig(overlap=overlap, max_model_len=200)
    rig.add(0, prompt, max_new_tokens=50)
    rig.run()
    assert rig.last(0).finish == "length"
    assert rig.tokens(0) == expected(prompt, len(rig.tokens(0)))
    assert len(rig.tokens(0)) == 10


@OVERLAP
def test_a_pool_that_is_too_small_ends_the_only_request_with_its_tokens_kept(make_rig, expected, overlap):
    """kv-10."""
    rig = make_rig(overlap=overlap, pages=8, max_model_len=200)
    rig.add(0, PROMPTS[1], max_new_tokens=100)
    rig.run()
    assert rig.last(0).finish == "length"
    assert len(PROMPTS[1]) + len(rig.tokens(0)) in (32, 33)
    assert rig.tokens(0) == expected(PROMPTS[1], len(rig.tokens(0)))
    rig.add(1, PROMPTS[0])
    rig.run()
    assert rig.tokens(1) == expected(PROMPTS[0], 8)

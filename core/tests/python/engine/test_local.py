"""The engine inside the calling process, with the built-in model and plugins alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tokenspeed.config import EngineConfig, ParallelConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.build import build_loop, build_rank
from tokenspeed.engine.channel import LocalChannel
from tokenspeed.engine.local import LocalEngine
from tokenspeed.errors import ConfigError, ModelError
from tokenspeed.messages import GenerateRequest, SamplingParams
from tokenspeed.weights.describe import describe_model


def engine(**settings: Any) -> LocalEngine:
    config = EngineConfig(model="toy", plugins="none", num_threads=1, **settings)
    return LocalEngine(assemble(config, describe_model("toy")))


PROMPTS = [[1, 2, 3], list(range(50)), [9]]


def test_prompts_run_together_as_they_run_alone() -> None:
    local = engine(max_total_tokens=2048)
    params = SamplingParams(8, temperature=0.9, seed=3, ignore_eos=True)
    together = [[t for item in outputs for t in item.tokens] for outputs in local.generate(PROMPTS, params)]
    alone = [[t for item in local.generate([prompt], params)[0] for t in item.tokens] for prompt in PROMPTS]
    assert together == alone
    assert [len(tokens) for tokens in together] == [8, 8, 8]


def test_requests_can_be_stepped_stopped_and_aborted() -> None:
    local = engine(max_total_tokens=2048)
    params = SamplingParams(100, temperature=0.0, ignore_eos=True)
    stopped, aborted = local.add_request(PROMPTS[0], params), local.add_request(PROMPTS[1], params)
    ends = {}
    for number in range(10):
        if number == 3:
            local.stop(stopped)
            local.abort(aborted)
        ends |= {item.rid: item.finish for item in local.step() if item.finish}
    assert ends == {stopped: "stop", aborted: "abort"}
    assert not local.busy
    assert local.control("stats").result.running == 0


def test_a_question_is_answered_however_much_was_queued_before_it() -> None:
    """E27: the channel hands out a bounded number of messages at a time."""
    local = engine(max_total_tokens=2048)
    rids = [local.add_request([1], SamplingParams(1, temperature=0.0)) for _ in range(600)]
    assert local.control("stats").result.waiting == len(rids)


def test_prompts_run_beside_requests_that_live_already() -> None:
    """E27: their outputs stay for the next step."""
    local = engine(max_total_tokens=2048)
    alone = [item.tokens for item in local.generate([PROMPTS[0]], SamplingParams(4, temperature=0.0))[0]]
    long, short = SamplingParams(20, temperature=0.0, ignore_eos=True), SamplingParams(4, temperature=0.0)
    other = local.add_request(PROMPTS[1], long)
    local.step()
    assert [item.tokens for item in local.generate([PROMPTS[0]], short)[0]] == alone
    items = []
    while local.busy:
        items += local.step()
    assert {item.rid for item in items} == {other}
    assert sum(len(item.tokens) for item in items) in (19, 20)  # the first may have been told by the step above


def test_a_quantised_checkpoint_is_refused_by_its_method_before_any_weight_is_read() -> None:
    """E15."""
    model = describe_model("toy")
    model = replace(model, config=model.config | {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(ModelError, match=r"quantised \('fp8'\), which is not supported"):
        LocalEngine(assemble(EngineConfig(model="toy", plugins="none", num_threads=1), model))


def test_the_pool_has_the_size_that_was_asked_for() -> None:
    local = engine(max_total_tokens=1000, block_size=16)
    assert (local.info.kv_pages, local.info.page_size) == (63, 16)
    by_bytes = engine(kv_cache_memory_bytes=local.info.kv_bytes)
    assert by_bytes.info.kv_pages == 63
    assert local.info.weight_bytes > 0
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        engine(kv_cache_memory_bytes=10)


def test_numbers_left_in_pages_by_others_reach_no_one() -> None:
    """kv-24: a request that failed with NaN leaves it in its pages; whoever gets them next never reads beyond what it wrote."""
    config = EngineConfig(model="toy", plugins="none", num_threads=1, max_total_tokens=2048)
    assembly = assemble(config, describe_model("toy"))
    answers = []
    for filling in (0.0, float("nan")):
        rank = build_rank(assembly)
        for tensor in rank.pool.tensors:
            tensor.fill_(filling)
        channel = LocalChannel()
        loop, _ = build_loop(assembly, rank, channel=channel)
        params = SamplingParams(6, temperature=0.0, ignore_eos=True)
        loop.take([GenerateRequest(i, np.array(p, dtype="<i4").tobytes(), params, 0.0) for i, p in enumerate(PROMPTS)])
        while loop.step():
            pass
        items = [item for message in channel.from_engine for item in message.items]  # type: ignore[union-attr]
        assert [item.finish for item in items if item.finish] == ["length"] * len(PROMPTS)
        answers.append([(item.rid, item.tokens) for item in items])
    assert answers[0] == answers[1]


def test_the_scheduler_is_told_what_steps_of_prompts_and_decodes_are_filled_up_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(model="toy", plugins="none", num_threads=1, max_total_tokens=2048)
    assembly = assemble(config, describe_model("toy"))
    rank = build_rank(assembly)
    for sizes in ((), (16, 32)):
        monkeypatch.setattr(type(rank.executor), "mixed_sizes", sizes)
        loop, _ = build_loop(assembly, rank, channel=LocalChannel())
        assert tuple(loop._scheduler.config.step_sizes) == sizes


def test_several_ranks_do_not_fit_in_one_process() -> None:
    with pytest.raises(ConfigError, match="tensor-parallel-size"):
        engine(parallel=ParallelConfig(tensor_parallel_size=2, world_size=2))


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--kv-cache-memory-bytes", {"kv_cache_memory_bytes": 400 << 40}),
        ("--max-total-tokens", {"max_total_tokens": 1_000_000_000}),
    ],
)
def test_a_pool_beyond_the_machine_is_refused_with_both_numbers(
    flag: str, settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenspeed.engine.pools._memory_bytes", lambda _: 64 << 30)
    with pytest.raises(ConfigError, match=rf"{flag}: .* needs [\d.]+ GiB of memory, and the machine has 64\.0 GiB"):
        engine(**settings)


def test_a_request_may_be_as_long_as_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    """What is announced is what a request gets in full: nothing is cut short for want of pages."""
    local = engine(max_total_tokens=64)
    assert local.info.max_model_len == 64
    assert "64 tokens" in caplog.text
    (outputs,) = local.generate([[1, 2, 3]], SamplingParams(61, temperature=0.0, ignore_eos=True))
    assert sum(len(item.tokens) for item in outputs) == 61

"""A model of two full groups, a window and a recurrent state (``hybrid``) gives the tokens of a run without cache, pressure or neighbours, whatever
the scheduler does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hybrid import GROUPS, HybridHashModel, continuation, prompts

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.messages import SamplingParams
from tokenspeed.plugins.manager import PluginHost
from tokenspeed.testing.plugins import PluginFolder
from tokenspeed.weights.describe import describe_model

Make = Callable[..., Any]


@pytest.fixture
def make(make_rig: Make) -> Make:
    """Makes engines around the model; ``pages`` of the full groups, the window group and the states."""

    def rig(*, pages: tuple[int, int, int] = (64, 48, 24), **options: Any) -> Any:
        full, window, states = pages
        return make_rig(
            make_model=HybridHashModel, groups=GROUPS, pages=full, further_pages=[window, states, full], **options
        )

    return rig


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_tokens_are_those_of_the_definition_with_many_at_once(make: Make, overlap: bool, caching: bool) -> None:
    rig = make(overlap=overlap, prefix_caching=caching)
    asked = prompts(24)
    for rid, prompt in enumerate(asked):
        rig.add(rid, prompt, max_new_tokens=20)
    rig.run()
    for rid, prompt in enumerate(asked):
        assert rig.tokens(rid) == continuation(prompt, 20)
    hits = rig.scheduler.stats().prefix_hit_tokens
    assert hits > 0 if caching else hits == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_retracted_requests_come_back_to_the_same_tokens(make: Make, overlap: bool) -> None:
    rig = make(overlap=overlap, pages=(16, 12, 6), max_num_seqs=4)
    rig.add(100, [1], max_new_tokens=1)  # outputs are expected to be short: more is admitted than fits
    rig.run()
    asked = prompts(12, seed=1)
    for rid, prompt in enumerate(asked):
        rig.add(rid, prompt, max_new_tokens=24)
    rig.run(5000)
    assert rig.scheduler.stats().retractions > 0
    for rid, prompt in enumerate(asked):
        assert rig.tokens(rid) == continuation(prompt, min(24, 64 - len(prompt) + 1))


def test_a_second_turn_goes_on_from_what_the_first_left_in_every_group(make: Make) -> None:
    rig = make()
    prompt = list(range(50, 70))
    rig.add(1, prompt, max_new_tokens=13)
    rig.run()
    answer = rig.tokens(1)
    again = [*prompt, *answer, 5]
    rig.add(2, again, max_new_tokens=9)
    rig.run()
    assert rig.tokens(2) == continuation(again, 9)
    assert rig.scheduler.stats().prefix_hit_tokens == 32  # the last multiple of the interval


def test_pages_behind_the_window_are_given_back(make: Make) -> None:
    rig = make(max_num_seqs=1, budget=8)
    rig.add(1, list(range(100)), max_new_tokens=40)
    most = [0, 0, 0, 0]
    while rig.turn() or rig.loop.busy:
        most = list(map(max, most, rig.scheduler.stats().pages_active))
    assert rig.tokens(1) == continuation(list(range(100)), 40)
    assert most == [35, 2, 1, 35]  # between steps: two pages hold the five tokens before the next


TYPES = ["full_attention", "sliding_attention", "linear_attention", "full_attention"]


def toy(host: PluginHost | None = None, **settings: Any) -> LocalEngine:
    """The built-in model with a layer of each kind."""
    model = describe_model("toy")
    further = {"num_hidden_layers": 4, "layer_types": TYPES, "sliding_window": 10, "state_interval": 16}
    plugins = "none" if host is None else ""
    config = EngineConfig(model="toy", plugins=plugins, num_threads=1, block_size=4, **settings)
    return LocalEngine(assemble(config, replace(model, config=model.config | further), host=host))


def drawn(engine: LocalEngine, asked: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    params = SamplingParams(count, temperature=0.0, ignore_eos=True)
    return [[t for item in outputs for t in item.tokens] for outputs in engine.generate(asked, params)]


def test_a_real_model_of_three_kinds_gives_the_same_tokens_with_cache_and_under_pressure() -> None:
    asked = [[token % 256 for token in prompt] for prompt in prompts(10, seed=2)]
    plain = toy(max_total_tokens=4096, enable_prefix_caching=False, max_num_seqs=1)
    alone = [drawn(plain, [prompt], 24)[0] for prompt in asked]
    cached = toy(max_total_tokens=4096)
    assert drawn(cached, asked, 24) == alone
    assert drawn(cached, asked, 24) == alone  # this time every prompt finds something
    assert cached.control("stats").result.cached_tokens > 0
    small = toy(max_total_tokens=80, max_num_seqs=6)
    drawn(small, [[1]], 1)  # outputs are expected to be short: more is admitted than fits
    assert drawn(small, asked, 24) == alone
    assert small.control("stats").result.retractions > 0


KERNELS = """
@hookimpl
def tokenspeed_kernels():
    return [KernelSpec(name="counted", family="recurrent", mode=mode, target="counted_states:" + mode) for mode in ("copy", "zero")]
"""
COUNTED = """
from tokenspeed.builtin.kernels import recurrent
calls = {"copy": 0, "zero": 0}
def copy(states, source, target):
    calls["copy"] += len(target)
    recurrent.copy(states, source, target)
def zero(states, target):
    calls["zero"] += len(target)
    recurrent.zero(states, target)
"""


def test_states_are_moved_by_the_kernels_that_the_user_named(tmp_path: Path) -> None:
    """``--kernel recurrent.copy=...`` reaches the steps, and a plugin that is only installed does not."""
    asked = [[token % 256 for token in prompt] for prompt in prompts(6, seed=3)]
    with PluginFolder(tmp_path) as folder:
        folder.add("theirs", KERNELS, modules={"counted_states": COUNTED})
        installed = toy(folder.load(), max_total_tokens=4096)
        assert "counted_states" not in sys.modules
        named = {"recurrent.copy": "counted", "recurrent.zero": "counted"}
        engine = toy(folder.load(), max_total_tokens=4096, kernel_overrides=named)
        calls: dict[str, int] = sys.modules["counted_states"].calls
        first = drawn(engine, asked, 24)
        assert calls["zero"] > 0, "states of new requests are zeroed"
        assert drawn(engine, asked, 24) == first
        assert calls["copy"] > 0, "kept states are continued in copies"
        assert first == drawn(installed, asked, 24)


def test_one_budget_is_shared_by_all_groups() -> None:
    engine = toy(kv_cache_memory_bytes=4 << 20, max_num_seqs=8)
    assert engine.info.kv_bytes <= 4 << 20
    assert engine.info.kv_bytes > 4_100_000
    assert engine.info.kv_pages > 1000

"""How a rank starts on a platform that queues its work, with a made-up one on the host: the largest step runs before the KV pool has its size, graphs have
memory kept for them, and what ends without graphs or memory says so."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tokenspeed.builtin.attention.torch_backend import TorchAttention
from tokenspeed.builtin.kernels import recurrent
from tokenspeed.builtin.platform_cpu import CpuPlatform
from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.graph_setup import plan_graphs
from tokenspeed.engine.local import LocalEngine
from tokenspeed.engine.report import capacity_text
from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.platform import MemoryUse, PlatformContext, PlatformDefaults
from tokenspeed.messages import SamplingParams
from tokenspeed.runtime.executor import ModelExecutor
from tokenspeed.runtime.plan import PlanView
from tokenspeed.runtime.warmup import largest_plan
from tokenspeed.testing.plugins import PluginFolder
from tokenspeed.weights.describe import describe_model

GIB = 2**30

PLUGIN = """
@hookimpl
def tokenspeed_platforms():
    return [PlatformSpec(name="pretend", target="pretend_parts:Pretend", detect="pretend_parts:detect", device_type="pretend")]

@hookimpl
def tokenspeed_attention_backends():
    return [
        AttentionBackendSpec(name="captured", target="pretend_parts:Captured", platforms=("pretend",), priority=Priority.PLUGIN),
        AttentionBackendSpec(name="plain", target="pretend_parts:Plain", platforms=("pretend",)),
    ]
"""

PARTS = """
from test_accelerator_parts import Captured, Plain, Pretend
def detect(): return "a pretended device"
"""


class Pretend(CpuPlatform):
    """A device of 8 GiB on the host. Steps keep 1 GiB of it once the largest one has run; a capture takes what ``per_graph`` says."""

    name = "pretend"
    events: ClassVar[list[str]] = []
    per_graph: ClassVar[int] = 2**20
    fail_at: ClassVar[str] = ""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.free, self.scratch, self.tags = 6 * GIB, 0, {"weights": 2 * GIB}

    @property
    def defaults(self) -> PlatformDefaults:
        return PlatformDefaults(chunked_prefill_size=256, max_num_seqs=16, page_size=16, overlap=False)

    @property
    def asynchronous(self) -> bool:
        return True

    @property
    def supports_graphs(self) -> bool:
        return True

    def kv_memory_bytes(self, utilization: float) -> int:
        self.events.append("size")
        return int(self.free - (1 - utilization) * 8 * GIB)

    def memory_use(self) -> MemoryUse:
        if "largest" in self.events and not self.scratch:
            self.scratch, self.free = GIB, self.free - GIB
        return MemoryUse(total=8 * GIB, free=self.free, scratch=self.scratch, tags=self.tags)

    def allocate(self, tag: str) -> AbstractContextManager[None]:
        return self._allocate(tag)

    @contextmanager
    def _allocate(self, tag: str) -> Iterator[None]:
        if tag == self.fail_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        yield

    def capture_graph(self, run: Any) -> Any:
        self.events.append("capture")
        self.free -= self.per_graph
        run()
        return run


class Plain(TorchAttention):
    """Decodes that cannot be captured."""


class Captured(TorchAttention):
    """Decodes that can."""

    graph_variants = (0,)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts engines of the built-in model on the made-up device."""
    parts = types.ModuleType("test_accelerator_parts")
    parts.Pretend, parts.Captured, parts.Plain = Pretend, Captured, Plain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "test_accelerator_parts", parts)
    monkeypatch.setattr(Pretend, "events", [])
    monkeypatch.setattr(Pretend, "per_graph", 2**20)
    monkeypatch.setattr(Pretend, "fail_at", "")
    execute = ModelExecutor.execute

    def seen(self: ModelExecutor, plan: PlanView, new: Any = ()) -> Any:
        Pretend.events.append("largest" if plan.num_rows == 16 else "step")
        return execute(self, plan, new)

    monkeypatch.setattr(ModelExecutor, "execute", seen)
    with PluginFolder(tmp_path) as folder:
        folder.add("pretend", PLUGIN, modules={"pretend_parts": PARTS}, first_party=True)

        def make(further: Mapping[str, Any] | None = None, **settings: Any) -> LocalEngine:
            config = EngineConfig(model="toy", device="pretend", num_threads=1, **settings)
            host, model = folder.load(), describe_model("toy")
            model = replace(model, config=model.config | dict(further or {}))
            return LocalEngine(assemble(config, model, host=host, accelerators=list))

        yield make


def test_the_pool_gets_its_size_after_the_largest_step_and_graphs_are_captured_last(start: Any) -> None:
    engine = start(gpu_memory_utilization=0.75)
    events = Pretend.events
    assert events.count("largest") == events.count("size") == 1
    assert events.index("largest") < events.index("size") < events.index("capture")
    assert "step" in events[: events.index("largest")], (
        "the other steps of the warm-up come before it, and none is added"
    )
    assert "step" not in events[events.index("largest") :]
    # Of 8 GiB: 2 weights, 1 steps, a quarter free; the rest is KV but for what is kept for graphs: twice a quarter of what the largest step takes, and more.
    assert 2.4 * GIB < engine.info.kv_bytes < 2.5 * GIB


def test_what_is_kept_for_graphs_is_not_kept_without_them(start: Any) -> None:
    captured = start().info.kv_bytes
    Pretend.events.clear()
    eager = start(enforce_eager=True).info
    assert eager.kv_bytes > captured
    assert "capture" not in Pretend.events
    assert eager.graphs == "off (--enforce-eager)"


def test_a_pool_of_a_size_that_was_given_is_taken_as_it_is(start: Any) -> None:
    assert start(max_total_tokens=1600).info.kv_pages == 100
    assert "size" not in Pretend.events
    assert "largest" in Pretend.events


def test_tokens_do_not_depend_on_the_pool_that_the_warm_up_used(start: Any) -> None:
    prompts, params = [[1, 2, 3], list(range(40))], SamplingParams(6, temperature=0.0, ignore_eos=True)

    def tokens(engine: LocalEngine) -> list[list[int]]:
        return [[t for item in outputs for t in item.tokens] for outputs in engine.generate(prompts, params)]

    host = LocalEngine(
        assemble(EngineConfig(model="toy", plugins="none", num_threads=1, max_total_tokens=2048), describe_model("toy"))
    )
    assert tokens(start(max_total_tokens=2048, enforce_eager=True)) == tokens(host)


def test_the_kernels_that_move_states_run_before_the_engine_is_ready(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they compile or load on first use is there when requests come; no state is touched."""
    calls: list[tuple[str, list[int], tuple[int, ...]]] = []
    defined = {"copy": recurrent.copy, "zero": recurrent.zero}
    for mode in ("copy", "zero"):

        def recording(states: torch.Tensor, *places: torch.Tensor, mode: str = mode) -> None:
            calls.append((mode, [int(place) for place in torch.cat(places)], tuple(states.shape[1:])))
            defined[mode](states, *places)

        monkeypatch.setattr(recurrent, mode, recording)
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"], "state_interval": 32}
    start(layers, max_total_tokens=4096, max_num_seqs=4, block_size=16)
    (shape,) = {shape for _, _, shape in calls}
    assert calls == [("zero", [-1], shape), ("copy", [-1, -1], shape)]


@pytest.mark.parametrize("last", ["sliding_attention", "linear_attention"])
def test_a_model_with_windows_or_states_starts_though_the_first_pool_holds_less_than_one_request(
    start: Any, last: str
) -> None:
    """The largest step runs over a page of each group; a window needs more, a state one to go on from."""
    types = ["full_attention", last]
    layers = {"num_hidden_layers": 2, "layer_types": types, "sliding_window": 100, "state_interval": 32}
    engine = start(layers, max_total_tokens=4096, max_num_seqs=4, block_size=16)
    prompts, params = [list(range(200)), [1, 2, 3]], SamplingParams(6, temperature=0.0, ignore_eos=True)
    config = EngineConfig(
        model="toy", plugins="none", num_threads=1, max_total_tokens=4096, max_num_seqs=4, block_size=16
    )
    model = describe_model("toy")
    host = LocalEngine(assemble(config, replace(model, config=model.config | layers)))
    first, second = (
        [[t for item in outputs for t in item.tokens] for outputs in made.generate(prompts, params)]
        for made in (engine, host)
    )
    assert first == second


def test_the_start_block_tells_graphs_and_memory(start: Any) -> None:
    engine = start()
    lines = {
        line[2:19].strip(): line[20:] for line in capacity_text(EngineConfig(model="toy"), engine.info).splitlines()
    }
    assert "in" in lines["weights"]
    assert lines["weights"].endswith("/s")
    assert lines["graphs"].startswith("5 in ")
    assert "of 1 to 16 rows" in lines["graphs"]
    assert lines["graphs"].endswith(
        "of decode steps alone: attention backend pretend:captured computes no prompts in a captured step"
    )
    assert lines["memory"].startswith("weights 2.0 GiB, steps 1.0 GiB, free ")
    assert lines["memory"].endswith("of 8.0 GiB")


def test_a_backend_that_cannot_be_captured_is_told_in_the_log_and_the_start_block(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tokenspeed.engine.graph_setup"):
        engine = start(decode_attention_backend="plain")
    why = "off: the decode steps of attention backend pretend:plain cannot be captured"
    assert engine.info.graphs == why
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"Captured graphs: {why}")
    ]
    assert "capture" not in Pretend.events


def test_graphs_that_take_more_than_was_kept_for_them_are_a_warning(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    start(gpu_memory_utilization=0.75)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    Pretend.events.clear()
    Pretend.per_graph = GIB
    start(gpu_memory_utilization=0.75)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "more than was kept for them" in warning
    assert "--gpu-memory-utilization 0.75 says; lower it" in warning


@pytest.mark.parametrize(
    ("stage", "settings", "sentence"),
    [
        ("graphs", {"gpu_memory_utilization": 0.9}, r"while capturing graphs .*lower --gpu-memory-utilization \(now 0.9\), or give --enforce-eager"),
        ("graphs", {"max_total_tokens": 1600}, r"while capturing graphs .*lower --max-total-tokens \(now 1600\)"),
        ("weights", {}, "while the weights were loaded .*take a smaller --dtype, or more devices with --tensor-parallel-size"),
        ("kv", {"gpu_memory_utilization": 0.8}, r"--gpu-memory-utilization: a KV pool of .*lower --gpu-memory-utilization \(now 0.8\)"),
    ],
)  # fmt: skip
def test_memory_that_runs_out_at_start_ends_in_a_sentence(
    start: Any, stage: str, settings: dict[str, Any], sentence: str
) -> None:
    Pretend.fail_at = stage
    with pytest.raises(ConfigError, match=sentence):
        start(**settings)


def test_a_largest_step_that_finds_no_memory_names_what_makes_it_smaller(start: Any, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    monkeypatch.setattr("tokenspeed.builtin.toy.ToyForCausalLM.forward", full)
    with pytest.raises(
        ConfigError, match=r"largest step ran .*lower --chunked-prefill-size \(now 256\) or --max-num-seqs"
    ):
        start()


@pytest.mark.parametrize(
    ("rows", "tokens", "longest", "prompts", "decodes"),
    [
        (256, 8192, 40960, 1, 255),
        (256, 8192, 2048, 4, 252),
        (4, 16, 4096, 1, 3),
        (1, 256, 64, 1, 0),
        (64, 64, 512, 1, 63),
        (8, 5, 100, 1, 4),
    ],
)
def test_the_largest_step_fills_rows_and_tokens_and_keeps_to_the_limits(
    rows: int, tokens: int, longest: int, prompts: int, decodes: int
) -> None:
    plan = largest_plan(rows, tokens, longest)
    assert (plan.num_extend_rows, plan.num_rows - plan.num_extend_rows) == (prompts, decodes)
    assert plan.num_tokens == min(tokens, prompts * longest + decodes)
    assert (plan.query_lens >= 1).all()
    assert (plan.context_lens + plan.query_lens <= longest).all()


def _decoder(variants: tuple[int, ...], extends: bool) -> Any:
    class Stand:
        graph_variants = variants
        captures_extend = extends

    return Stand()


def _scan(decodes: bool, extends: bool) -> Any:
    class Stand:
        captures = decodes
        captures_extend = extends

    return Stand()


@pytest.mark.parametrize(
    ("settings", "scans", "decoder", "max_tokens", "note", "captures"),
    [
        ({}, [], _decoder((0, 1), True), 2048, "", (True, True)),
        ({}, [_scan(False, False)], _decoder((0,), True), 2048, "off: the model has recurrent layers, which", (False, False)),
        ({}, [_scan(True, False)], _decoder((0,), True), 2048, "of decode steps alone: the model's recurrent layers", (True, False)),
        ({}, [_scan(True, True)], _decoder((0,), True), 2048, "", (True, True)),
        ({}, [], _decoder((), True), 2048, "attention backend b cannot be captured", (False, False)),
        ({"enforce_eager": True}, [], _decoder((0,), True), 2048, "off (--enforce-eager)", (False, False)),
        ({}, [], _decoder((0,), True), 64, "a step of 64 tokens is smaller than any", (True, False)),
        ({"cudagraph_capture_sizes": (4, 64)}, [], _decoder((0,), True), 2048, "64 left out: a step has 32 rows at most", (True, True)),
        ({"cudagraph_capture_sizes": (64,)}, [], _decoder((0,), True), 2048, "at most, and the platform's own are taken", (True, True)),
    ],
)  # fmt: skip
def test_why_graphs_are_off_or_fewer_than_asked_for_is_told(
    settings: dict[str, Any], scans: list[Any], decoder: Any, max_tokens: int, note: str, captures: tuple[bool, bool]
) -> None:
    plan = plan_graphs(
        EngineConfig(model="m", **settings),
        Pretend(PlatformContext()),
        [decoder],
        scans,
        decoder_name="b",
        max_rows=32,
        max_tokens=max_tokens,
    )
    assert note in plan.note
    assert bool(plan.note) is bool(note)
    assert (bool(plan.sizes), bool(plan.tokens)) == captures


def test_experts_whose_kernel_waits_for_the_device_keep_graphs_off() -> None:
    config, platform, decoders = EngineConfig(model="m"), Pretend(PlatformContext()), [_decoder((0,), True)]
    for captures, note in (
        (False, "off: the kernel of the model's experts (moe.experts) cannot be captured"),
        (True, ""),
    ):
        experts: list[Any] = [_scan(captures, False)]
        plan = plan_graphs(
            config, platform, decoders, [], decoder_name="b", max_rows=32, max_tokens=2048, experts=experts
        )
        assert (plan.note, bool(plan.sizes)) == (note, captures)


def test_a_platform_without_graphs_has_nothing_to_say_of_them() -> None:
    plan = plan_graphs(
        EngineConfig(model="m"), CpuPlatform(PlatformContext()), [], [], decoder_name="b", max_rows=8, max_tokens=64
    )
    assert (plan.sizes, plan.note) == ((), "")

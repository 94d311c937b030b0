"""Layers of different kinds run on the backends that were chosen for their kind, and the tokens are those of one backend for all."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed.builtin.attention.torch_backend import TorchAttention
from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import Assembly, assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.errors import PluginError
from tokenspeed.messages import SamplingParams
from tokenspeed.weights.describe import describe_model

TYPES = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]


class Recording(TorchAttention):
    """Remembers the windows of the layers that it was asked to serve."""

    windows: set[int]

    def forward_extend(self, q: torch.Tensor, kv: Any, layer: Any, batch: Any) -> torch.Tensor:
        self.windows.add(layer.window)
        return super().forward_extend(q, kv, layer, batch)

    def forward_decode(self, q: torch.Tensor, kv: Any, layer: Any, batch: Any) -> torch.Tensor:
        self.windows.add(layer.window)
        return super().forward_decode(q, kv, layer, batch)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    """The class, where a spec can name it."""
    module = ModuleType("recording_attention")
    made = type("Made", (Recording,), {"windows": set()})
    module.Made = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def made(**config: Any) -> Assembly:
    model = describe_model("toy")
    settings = EngineConfig(model="toy", plugins="none", num_threads=1, max_total_tokens=2048)
    further = {"num_hidden_layers": 4, "layer_types": TYPES, "sliding_window": 10} | config
    return assemble(settings, replace(model, config=model.config | further))


def served_by(assembly: Assembly, slots: tuple[str, ...], **supports: Any) -> Assembly:
    """The assembly with another backend in these slots."""
    changed = dict(assembly.choices)
    for slot in slots:
        winner = changed[slot].winner
        spec = replace(winner.spec, name="recording", target="recording_attention:Made")
        spec = replace(spec, supports=replace(spec.supports, **supports))
        changed[slot] = replace(changed[slot], winner=replace(winner, spec=spec))
    return replace(assembly, choices=changed)


def tokens(assembly: Assembly) -> list[list[int]]:
    engine = LocalEngine(assembly)
    prompts = [list(range(5, 5 + n)) for n in (1, 9, 30)]
    params = SamplingParams(12, temperature=0.0, ignore_eos=True)
    return [[t for item in outputs for t in item.tokens] for outputs in engine.generate(prompts, params)]


@pytest.mark.parametrize(
    ("slots", "seen"),
    [
        (("attention.extend", "attention.decode"), {0}),
        (("attention.window.extend", "attention.window.decode"), {10}),
        (("attention.extend", "attention.window.decode"), {0, 10}),
    ],
    ids=["full", "windows", "one phase of each"],
)
def test_a_backend_serves_the_layers_of_its_kind_and_no_others(
    recording: type[Recording], slots: tuple[str, ...], seen: set[int]
) -> None:
    assembly = made()
    assert assembly.attention_kinds == ("full", "window")
    alone = tokens(assembly)
    assert tokens(served_by(assembly, slots)) == alone
    assert recording.windows == seen


def test_a_window_that_the_configuration_hides_is_refused_before_the_first_step(recording: type[Recording]) -> None:
    """A class may make windows that ``config.json`` does not speak of: a backend without them must not compute something else."""
    assembly = made(use_sliding_window=False)
    assert assembly.attention_kinds == ("full",)
    with pytest.raises(PluginError, match=r"recording cannot serve ToyForCausalLM: the cache group of layers 1, 3 has"):
        LocalEngine(served_by(assembly, ("attention.extend",), kinds=("mha", "gqa")))

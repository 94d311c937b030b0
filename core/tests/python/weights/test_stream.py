"""Streams of weights: safetensors shards, dummy weights, the progress bar."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.builtin.toy import ToyForCausalLM
from tokenspeed.errors import ModelError
from tokenspeed.layers import load_weights
from tokenspeed.testing.harness import ModelHarness, run_ranks
from tokenspeed.weights.describe import describe_model
from tokenspeed.weights.dummy import dummy_weights
from tokenspeed.weights.progress import with_progress
from tokenspeed.weights.stream import iterate_weights


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"]}))
    save_file({"a": torch.arange(4.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}, tmp_path / "m-1.safetensors")
    save_file({"c": torch.zeros(3)}, tmp_path / "m-2.safetensors")
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_every_shard_is_read_in_its_own_element_types(sharded: Path) -> None:
    got = dict(iterate_weights(describe_model(str(sharded))))
    assert {name: tensor.dtype for name, tensor in got.items()} == {
        "a": torch.float32,
        "b": torch.bfloat16,
        "c": torch.float32,
    }
    assert got["a"].tolist() == [0, 1, 2, 3]


def test_a_damaged_shard_is_named(sharded: Path) -> None:
    (sharded / "m-2.safetensors").write_bytes(b"not a shard")
    with pytest.raises(ModelError, match=r"m-2\.safetensors.*download it again"):
        list(iterate_weights(describe_model(str(sharded))))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_a_terminal_and_nowhere_else() -> None:
    weights = [("a", torch.zeros(5)), ("b", torch.zeros(5))]
    terminal, pipe = Terminal(), io.StringIO()
    assert list(with_progress(iter(weights), 2, stream=terminal)) == weights
    assert "2/2" in terminal.getvalue()
    assert terminal.getvalue().endswith("s\n")
    assert list(with_progress(iter(weights), 2, stream=pipe)) == weights
    assert pipe.getvalue() == ""


def test_dummy_weights_repeat_and_follow_the_seed() -> None:
    model = ModelHarness(ToyForCausalLM, describe_model("toy")).model
    first, again, other = (dict(dummy_weights(model, seed=seed)) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert load_weights(model, first.items()) == {name for name, _ in model.named_parameters()}


def test_drawing_dummy_weights_is_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, terminal = ModelHarness(ToyForCausalLM, describe_model("toy")).model, Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    count = len(list(iterate_weights(describe_model("toy"), model=model, progress=True)))
    assert f"{count}/{count}" in terminal.getvalue()
    assert "Drawing weights" in terminal.getvalue()
    assert not list(iterate_weights(describe_model("toy"), model=model))[count:], "without a bar the same ones"


def test_dummy_weights_need_the_model() -> None:
    with pytest.raises(ValueError, match="need the model"):
        iterate_weights(describe_model("toy"))


def test_the_toy_is_the_same_model_on_two_ranks() -> None:
    description = describe_model("toy")
    alone = ModelHarness(ToyForCausalLM, description).greedy(list(b"hello"), 8)
    assert (
        run_ranks(2, lambda group: ModelHarness(ToyForCausalLM, description, group=group).greedy(list(b"hello"), 8))
        == [alone] * 2
    )


def test_toy_tokens_depend_on_the_whole_prompt_and_not_on_its_chunks() -> None:
    harness = ModelHarness(ToyForCausalLM, describe_model("toy"))
    whole = harness.greedy(list(b"the quick brown fox"), 6)
    assert harness.greedy(list(b"the quick brown fox"), 6, chunk=4) == whole
    assert harness.greedy(list(b"The quick brown fox"), 6) != whole

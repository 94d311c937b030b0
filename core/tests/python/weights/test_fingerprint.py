"""Which checkpoint pages belong to: equal for copies, another one for whatever training changes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.weights.describe import describe_model
from tokenspeed.weights.fingerprint import fingerprint

TOY = describe_model("toy")


def weights() -> dict[str, torch.Tensor]:
    """Large tensors of many layers, of which the sampled middle and ends of the file see nothing in between, and a small one."""
    made = {f"layers.{index}.q_proj": torch.arange(1 << 19, dtype=torch.float32).view(512, -1) for index in range(8)}
    return {**made, "norm": torch.ones(128)}


def print_of(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    save_file(dict(tensors), path)
    return fingerprint(dataclasses.replace(TOY, format="safetensors", weight_files=(str(path),)))


def scale_all(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.2.q_proj"] += 1e-2 * torch.randn(512, 1)


def one_small_element(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm"][77] += 1


def another_name(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.9.q_proj"] = tensors.pop("layers.7.q_proj")


@pytest.mark.parametrize("change", [scale_all, one_small_element, another_name])
def test_a_tune_of_one_tensor_is_another_checkpoint(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    """Sizes, configuration and all other tensors are equal, as after merging an adapter of one layer."""
    torch.manual_seed(0)
    tensors = weights()
    first, copy = print_of(tmp_path / "a", tensors), print_of(tmp_path / "b", tensors)
    change(tensors)
    assert first == copy != print_of(tmp_path / "c", tensors)


def test_the_configuration_is_part_of_it() -> None:
    assert fingerprint(dataclasses.replace(TOY, config={**TOY.config, "rope_theta": 1.0})) != fingerprint(TOY)


@pytest.mark.parametrize("head", [b"", b"header", b"GGUF" + bytes(30), b"\x40" + bytes(7) + b"{no json" + bytes(56)])
def test_a_file_of_another_form_is_sampled_all_over(tmp_path: Path, head: bytes) -> None:
    prints = []
    for name, tail in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        path = tmp_path / name
        path.write_bytes(head + bytes(3 << 20) + tail * (1 << 20))
        prints.append(fingerprint(dataclasses.replace(TOY, weight_files=(str(path),))))
    assert prints[0] == prints[1] != prints[2]


def test_the_cost_is_bounded_by_the_number_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of two megabytes costs eight pages of the system, not two megabytes."""
    read = []
    proper = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read.append(size) or proper(fd, size, at))
    print_of(tmp_path / "a", weights())
    assert sum(read) < 9 * 8 * 4096 + (1 << 16)

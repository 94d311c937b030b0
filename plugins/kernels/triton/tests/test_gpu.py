"""The conformance suite of every kernel on a device: ``pytest -m gpu plugins/kernels/triton``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from tokenspeed_plugin_kernels_triton.gemm import SmallGemm
from tokenspeed_plugin_kernels_triton.limits import shared_memory_limit
from tokenspeed_plugin_kernels_triton.plugin import tokenspeed_kernels
from tokenspeed_plugin_kernels_triton.search import add_arguments, run

from tokenspeed.plugins import KernelSpec
from tokenspeed.testing.kernel import KernelSuite

pytestmark = pytest.mark.gpu


def suite(spec: KernelSpec) -> type:
    where = {"device": "cuda", "platform": "cuda", "capability": (9, 0)}
    return type(f"Test_{spec.family}_{spec.mode}", (KernelSuite,), {"spec": spec, "__module__": __name__, **where})


for _spec in tokenspeed_kernels():
    globals()[f"Test_{_spec.family}_{_spec.mode}"] = suite(_spec)


def test_the_shared_memory_that_is_counted_with_is_the_devices() -> None:
    device = torch.device("cuda")
    assert SmallGemm(device).tuning.limit == shared_memory_limit(torch.cuda.get_device_capability(device))


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288), (1000, 520)])
def test_generic_tiles_run_and_are_right(rows: int, n: int, k: int) -> None:
    """What a card without a search gets."""
    gemm = SmallGemm(torch.device("cuda"))
    gemm.tuning = type(gemm.tuning)(None, gemm.tuning.limit)
    x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * 0.02
    torch.testing.assert_close(gemm(x, w), torch.nn.functional.linear(x, w), atol=3e-2, rtol=3e-2)


def test_a_search_finds_tiles_that_serve_this_card_and_are_kept_with_their_evidence(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser(prog="tune-gemm")
    add_arguments(parser)
    out = str(tmp_path / "tiles.json")
    asked = ["--shape", "1024x512", "--shape", "2048x512:gated", "--rows", "1", "8", "--seconds", "30", "--out", out]
    assert run(parser.parse_args(asked)) == 0
    record = json.loads(Path(out).read_text())
    assert record["device"] == torch.cuda.get_device_name()
    assert [(entry["rows"], entry["n"]) for entry in record["measured"]] == [(1, 1024), (1, 2048), (8, 1024), (8, 2048)]
    gemm = SmallGemm(torch.device("cuda"), tiles=out)
    x = torch.randn(8, 512, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(1024, 512, dtype=torch.bfloat16, device="cuda") * 0.02
    torch.testing.assert_close(gemm(x, w), torch.nn.functional.linear(x, w), atol=3e-2, rtol=3e-2)

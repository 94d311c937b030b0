"""Inputs that kernels are timed with: every operation has some, and a measurement counts for what layers and backends ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed.benchmark.kernel_inputs import PAGED, SIZES, arguments_for, asked_shape, sizes_of
from tokenspeed.builtin.kernels.catalog import REFERENCE_KERNELS
from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.plugins.selection import load_target
from tokenspeed.weights.describe import describe_model

SMALL = {
    "n": 16, "k": 8, "hidden": 16, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "rotary_dim": 8, "vocab": 50, "vocab_size": 70,
    "rank": 8, "rope_dim": 4, "page_size": 16, "context": 20, "experts": 6, "top_k": 2, "intermediate": 12, "states": 8, "heads": 2, "key_dim": 4,
    "value_dim": 4,
}  # fmt: skip


def test_every_operation_can_be_timed_but_collectives() -> None:
    operations = {f"{spec.family}.{spec.mode}" for spec in REFERENCE_KERNELS}
    assert set(SIZES) == {name for name in operations if not name.startswith("comm.")}
    with pytest.raises(ConfigError, match=r"comm\.all_reduce: it takes several processes"):
        sizes_of("comm.all_reduce", {})


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("operation", SIZES)
def test_the_reference_takes_the_inputs(operation: str, layout: str) -> None:
    family, _, mode = operation.partition(".")
    kernel = load_target(f"tokenspeed.builtin.kernels.{family}:{mode}")
    sizes = {name: SMALL[name] for name in SIZES[operation]}
    for rows in (1, 5):
        for pages in (None, torch.float8_e4m3fn) if operation in PAGED else (None,):
            cpu = torch.device("cpu")
            arguments = arguments_for(operation, rows, sizes, torch.float32, cpu, layout=layout, pages_dtype=pages)
            kernel(*arguments)
            assert all(argument.isfinite().all() for argument in arguments[:1] if family not in ("sampling",))


def test_layers_and_backends_ask_with_the_sizes_that_measurements_are_kept_by(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[KernelRequest] = []
    select = KernelRegistry.select

    def recording(self: KernelRegistry, request: Any) -> Callable[..., Any]:
        asked.append(request)
        return select(self, request)

    monkeypatch.setattr(KernelRegistry, "select", recording)
    engine = LocalEngine(assemble(EngineConfig(model="toy", device="cpu"), describe_model("toy")))
    engine.close()
    found = {f"{request.family}.{request.mode}": set(request.shape) for request in asked}
    assert {"gemm.linear", "embedding.lookup", "rope.qkv_rope_write", "sampling.argmax", "norm.rms_norm"} <= set(found)
    assert found == {operation: set(asked_shape(operation, {})) for operation in found}
    layouts = {f"{request.family}.{request.mode}" for request in asked if request.layout}
    assert layouts == {operation for operation in found if operation in PAGED}


def test_an_unknown_size_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--shape width: gemm\.linear has the sizes n, k"):
        sizes_of("gemm.linear", {"width": 3})

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tokenspeed_plugin_kernels_cpu.runtime import Runtime, supported_isas


@pytest.fixture(params=supported_isas(), scope="session")
def runtime(request: pytest.FixtureRequest) -> Runtime:
    """A runtime of two threads for each instruction set that this processor has."""
    return Runtime(2, request.param)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Random tensors are the same in every run and in every order of tests."""
    with torch.random.fork_rng():
        torch.manual_seed(20)
        yield

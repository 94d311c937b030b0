"""What the conformance suites need of pytest, loaded by its entry point ``tokenspeed`` in every run: the markers that they use."""

from __future__ import annotations

import pytest

__all__ = ["pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    """A plugin outside this repository need not declare our markers itself."""
    config.addinivalue_line("markers", "slow: takes long; run with -m slow")
    config.addinivalue_line("markers", "gpu: needs a GPU; run with -m gpu")

"""What every module here does with the host's processors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

#: Of CPU references and of what torch computes on the host. Their operations are small and gain little from more; where several test processes run beside each
#: other, a thread a processor in each of them is more threads than there are processors, and each operation waits for the last of its own.
THREADS = 4


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> Iterator[int]:
    """Threads for CPU references (``num_threads``), and of torch meanwhile."""
    before = torch.get_num_threads()
    threads = min(THREADS, before)
    torch.set_num_threads(threads)
    yield threads
    torch.set_num_threads(before)

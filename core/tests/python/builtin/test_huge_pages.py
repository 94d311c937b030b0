"""Memory moved to huge pages: which parts are, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenspeed.builtin.huge_pages import HUGE, spans
from tokenspeed.builtin.platform_cpu import CpuPlatform
from tokenspeed.interfaces.platform import PlatformContext

_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_only_whole_huge_pages_are_taken() -> None:
    assert spans([(HUGE + 1, 3 * HUGE)]) == [(2 * HUGE, 4 * HUGE)]
    assert spans([(1, HUGE)]) == []


def test_neighbours_share_the_page_of_their_border() -> None:
    """An allocator puts a header between two blocks; the huge page that holds it is taken as well."""
    half = HUGE // 2
    assert spans([(HUGE + half + 16, half - 16), (HUGE, half)]) == [(HUGE, 2 * HUGE)]
    assert spans([(HUGE, half), (HUGE + half + (128 << 10), half)]) == []


@pytest.mark.parametrize("tag", ["weights", "kv"])
def test_settled_tensors_keep_place_and_content(tag: str) -> None:
    tensors = [torch.arange(3 << 20, dtype=torch.float32), torch.ones(7), torch.zeros(0)]
    before = [(tensor.data_ptr(), tensor.clone()) for tensor in tensors]
    CpuPlatform(PlatformContext()).settle(tag, tensors)
    for tensor, (address, content) in zip(tensors, before, strict=True):
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, content)


@pytest.mark.skipif(
    not _MODE.exists() or "[never]" in _MODE.read_text(), reason="needs a Linux that gives huge pages to those who ask"
)
def test_settled_memory_asks_for_huge_pages() -> None:
    """The mapping that holds the tensor carries the mark ``hg`` in ``VmFlags``."""
    tensor = torch.ones(16 << 20)
    CpuPlatform(PlatformContext()).settle("weights", [tensor])
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= middle < end
        elif inside and first == "VmFlags:":
            assert "hg" in line.split()
            return
    pytest.fail("the tensor's mapping was not found")

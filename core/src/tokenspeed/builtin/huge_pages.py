"""Memory that is read again in every step, moved to huge pages where the system has them. Linux; elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

__all__ = ["collapse", "prefer", "spans"]

#: What both x86 and 64-bit ARM with 4 KiB pages call a huge page.
HUGE = 2 << 20
#: Blocks that lie next to each other but for an allocator's header are one span: huge pages cover borders.
_NEAR = 64 << 10
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # since Linux 6.1


def prefer(blocks: Iterable[tuple[int, int]]) -> None:
    """Ask that (address, bytes) ``blocks``, touched from now on, come in huge pages."""
    for begin, end in spans(blocks):
        _advise(begin, end, _MADV_HUGEPAGE)


def collapse(blocks: Iterable[tuple[int, int]]) -> None:
    """Move the content of ``blocks``, all of it touched, into huge pages now; where the system cannot, it may still do so later by itself."""
    for begin, end in spans(blocks):
        if _advise(begin, end, _MADV_HUGEPAGE):
            _advise(begin, end, _MADV_COLLAPSE)


def spans(blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The whole huge pages, (begin, end) addresses, inside the union of (address, bytes) ``blocks``."""
    merged: list[tuple[int, int]] = []
    for begin, size in sorted(blocks):
        if merged and begin - merged[-1][1] < _NEAR:
            merged[-1] = (merged[-1][0], max(merged[-1][1], begin + size))
        else:
            merged.append((begin, begin + size))
    whole = [(-(-begin // HUGE) * HUGE, end // HUGE * HUGE) for begin, end in merged]
    return [(begin, end) for begin, end in whole if begin < end]


def _advise(begin: int, end: int, advice: int) -> bool:
    """Whether the system took the advice. It is free not to: then everything works as before, only slower."""
    if sys.platform != "linux":
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(begin, end - begin, advice) == 0)

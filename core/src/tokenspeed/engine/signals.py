"""Signals that wait: what must not be torn apart runs to its end before a handler raises."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["deferred_signals"]

_DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Handlers of SIGINT, SIGTERM and SIGALRM run at the end of the block, Ctrl-C's ``KeyboardInterrupt`` too.

    Python runs handlers in the main thread alone; in any other one there is nothing to defer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = {number: signal.getsignal(number) for number in _DEFERRED}
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, lambda *told: came.append(told))
    try:
        yield
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)
        for told, frame in came:
            handler = before[signal.Signals(told)]
            if callable(handler):
                handler(told, frame)

"""Names the plugin that hangs while it is loaded, and ends the process if it never comes back.

An import cannot be interrupted from outside (it may hold the import lock, or loop in C), so the end is ``os._exit``: at that moment the process has
started nothing yet that would need to be put away.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["LoadLimits", "Watchdog"]

_log = logging.getLogger(__name__)


def _end_process(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    os._exit(1)


@dataclass(frozen=True, kw_only=True)
class LoadLimits:
    """Seconds that one plugin's import and registration may take before it is named, and before ``end`` is called with a message."""

    warn_s: float = 5.0
    end_s: float = 60.0
    end: Callable[[str], None] = _end_process


class Watchdog:
    """Watches the loading thread from a thread of its own, which lives as long as the ``with`` block.

    Args:
        clock: seconds; what ``limits`` are measured by.
    """

    def __init__(self, limits: LoadLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._changed = threading.Condition()
        self._watched: tuple[str, float] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="plugin-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @contextmanager
    def watching(self, plugin: str) -> Iterator[None]:
        """Time what happens in the block as the loading of ``plugin``."""
        started = self._clock()
        _log.debug("plugin %s: loading", plugin)
        with self._changed:
            self._watched = (plugin, started)
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._watched = None
                self._changed.notify()
            _log.debug("plugin %s: %.1f ms", plugin, (self._clock() - started) * 1e3)

    def _watch(self) -> None:
        warned: tuple[str, float] | None = None
        with self._changed:
            while not self._closed:
                current = self._watched
                if current is None:
                    self._changed.wait()
                    continue
                plugin, started = current
                elapsed = self._clock() - started
                if elapsed >= self._limits.end_s:
                    self._watched = None
                    self._limits.end(
                        f"plugin {plugin!r} has been loading for {elapsed:.0f} s and is given up; the start ends here. "
                        f"Start without it (--plugins=-{plugin}) and tell its author."
                    )
                    continue
                if elapsed >= self._limits.warn_s and warned != current:
                    warned = current
                    _log.warning("plugin %r has been loading for %.0f s", plugin, elapsed)
                until = self._limits.end_s if warned == current else self._limits.warn_s
                self._changed.wait(max(0.0, until - elapsed))

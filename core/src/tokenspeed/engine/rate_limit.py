"""Log lines that a fault may repeat without end: one in a while, with a count of those left out."""

from __future__ import annotations

import logging
import time

__all__ = ["RateLimitedLog"]


class RateLimitedLog:
    """Passes a warning on at most once in ``interval_s``."""

    def __init__(self, log: logging.Logger, interval_s: float = 10.0) -> None:
        self._log = log
        self._interval_s = interval_s
        self._next_s = 0.0
        self._left_out = 0

    def warning(self, text: str, *args: object) -> None:
        """Log ``text % args``, or count it as left out."""
        now = time.monotonic()
        if now < self._next_s:
            self._left_out += 1
            return
        more = f" ({self._left_out} similar lines were left out)" if self._left_out else ""
        self._log.warning(text + more, *args)
        self._next_s, self._left_out = now + self._interval_s, 0

"""Where the log of a command goes: standard error, one line an event."""

from __future__ import annotations

import logging
import sys

__all__ = ["configure_logging"]


def configure_logging(level: str) -> None:
    """Send the project's log of ``level`` (``debug`` to ``critical``; ``trace`` is ``debug``) and above to standard error. May be called again."""
    logger = logging.getLogger("tokenspeed")
    logger.setLevel(getattr(logging, "DEBUG" if level == "trace" else level.upper()))
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False

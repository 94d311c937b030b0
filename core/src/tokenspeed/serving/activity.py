"""Whether silent processes are at work: tells a long step from a hang."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["ProcessActivity"]


class ProcessActivity:
    """CPU time of processes, read from ``/proc`` (Linux); elsewhere nothing is known and no process counts as active.

    Args:
        pids: the processes to watch.
        root: where process files lie.
    """

    def __init__(self, pids: Sequence[int], root: Path = Path("/proc")) -> None:
        self._files = [root / str(pid) / "stat" for pid in pids]
        self._ticks = -1

    def progressed(self) -> bool:
        """Whether any of them used CPU time since the last call; the first call only looks."""
        ticks = sum(map(_ticks, self._files))
        before, self._ticks = self._ticks, ticks
        return before >= 0 and ticks > before


def _ticks(file: Path) -> int:
    """User and system time in clock ticks; fields 14 and 15, counted behind the name, which may hold blanks."""
    try:
        fields = file.read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return 0

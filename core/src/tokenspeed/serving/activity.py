"""Whether silent processes are at work: tells a long step from a hang."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["ProcessActivity"]


class ProcessActivity:
    """CPU time of processes and of their children (compilers), read from ``/proc`` (Linux); elsewhere nothing is known and no process counts as active.

    A process that waits for a processor, or for the disk, counts as active: a loaded machine is slow, not hung. Where one is stopped by a signal none
    does: the others can only wait for it.

    Args:
        pids: the processes to watch.
        root: where process files lie.
    """

    def __init__(self, pids: Sequence[int], root: Path = Path("/proc")) -> None:
        self._folders = [root / str(pid) for pid in pids]
        self._root = root
        self._ticks = -1

    def progressed(self) -> bool:
        """Whether any of them used CPU time since the last call, or would if it could; the first call only looks."""
        looks = [_look(folder / "stat") for folder in self._folders]
        if any(state == "T" for state, _ in looks):
            return False
        looks += [_look(self._root / child / "stat") for folder in self._folders for child in _children(folder)]
        ticks = sum(ticks for _, ticks in looks)
        before, self._ticks = self._ticks, ticks
        return before >= 0 and (ticks > before or any(state in ("R", "D") for state, _ in looks))


def _look(file: Path) -> tuple[str, int]:
    """State, and user and system time in clock ticks; fields 3, 14 and 15, counted behind the name, which may hold blanks."""
    try:
        fields = file.read_text().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return "", 0


def _children(folder: Path) -> list[str]:
    """Processes that its main thread started, as the kernel lists them; none where it keeps no such list."""
    try:
        return (folder / "task" / folder.name / "children").read_text().split()
    except OSError:
        return []

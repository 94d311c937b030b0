"""Whether silent processes are at work: tells a long step from a hang."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["ProcessActivity"]

#: Time between two looks for which threads waited for a processor that counts: one that sleeps and wakes on a quiet machine waits for microseconds.
_STARVED_NS = 100_000_000


class ProcessActivity:
    """CPU time of processes and of their children (compilers), read from ``/proc`` (Linux); elsewhere nothing is known and no process counts as active.

    A process with a thread that waits for a processor, or for the disk, counts as active: a loaded machine is slow, not hung. Where one is stopped by a signal
    none does: the others can only wait for it.

    Args:
        pids: the processes to watch.
        root: where process files lie.
    """

    def __init__(self, pids: Sequence[int], root: Path = Path("/proc")) -> None:
        self._folders = [root / str(pid) for pid in pids]
        self._root = root
        self._ticks = -1
        self._waited: dict[Path, int] = {}

    def progressed(self) -> bool:
        """Whether any of them used CPU time since the last call, or would if it could; the first call only looks."""
        looks = [_look(folder / "stat") for folder in self._folders]
        if any(state == "T" for state, _ in looks):
            return False
        looks += [_look(self._root / child / "stat") for folder in self._folders for child in _children(folder)]
        threads = [thread for folder in self._folders for thread in _threads(folder)]
        states = [state for state, _ in looks] + [_look(thread / "stat")[0] for thread in threads]
        ticks, waited = sum(ticks for _, ticks in looks), {thread: _waited_ns(thread) for thread in threads}
        before, self._ticks = self._ticks, ticks
        starved = sum(max(0, ns - self._waited.get(thread, ns)) for thread, ns in waited.items())
        self._waited = waited
        return before >= 0 and (
            ticks > before or starved >= _STARVED_NS or any(state in ("R", "D") for state in states)
        )


def _look(file: Path) -> tuple[str, int]:
    """State, and user and system time in clock ticks; fields 3, 14 and 15, counted behind the name, which may hold blanks."""
    try:
        fields = file.read_text().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return "", 0


def _threads(folder: Path) -> list[Path]:
    try:
        return list((folder / "task").iterdir())
    except OSError:
        return []


def _waited_ns(thread: Path) -> int:
    """Nanoseconds that a thread was ready to run and did not, the second figure of ``schedstat``; 0 where the kernel keeps none."""
    try:
        return int((thread / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _children(folder: Path) -> list[str]:
    """Processes that its main thread started, as the kernel lists them; none where it keeps no such list."""
    try:
        return (folder / "task" / folder.name / "children").read_text().split()
    except OSError:
        return []

"""The cap on a directory of frames that many processes write: whoever has written a share of it counts all, and removes what was used least recently."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tokenspeed_plugin_kvstore_file.access import Access

__all__ = ["Cap"]

#: Shares of the cap: what a process writes before it counts again, and once more while it counts; where an eviction begins, and where it ends. Four
#: processes may write at full speed and the cap holds.
_SLACK = 0.01
_BEGIN = 0.92
_END = 0.85
#: Leavings of processes that died while they wrote.
_STALE_S = 3600.0


class Cap:
    """Keeps files under ``root`` below ``size`` bytes, on a thread: counting a large directory takes longer than a call may.

    ``evicted`` counts the files that this object removed.
    """

    def __init__(self, root: Path, size: int, access: Access) -> None:
        self.bytes = size
        self.evicted = 0
        self._root = root
        self._access = access
        self._since = size  # counts on its first write: others may have filled the directory
        self._thread: threading.Thread | None = None

    def added(self, count: int) -> None:
        """So many bytes were written; begins to count where that is due."""
        self._since += count
        if self._since < self.bytes * _SLACK or self._counting:
            return
        self._since = 0
        self._thread = threading.Thread(target=self._evict_alone, name="kvstore file eviction", daemon=True)
        self._thread.start()

    @property
    def room(self) -> bool:
        """Whether more may be written now: not while a count is going on and much was written since it began."""
        return self._since < self.bytes * _SLACK or not self._counting

    @property
    def _counting(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until a count that was begun has ended."""
        if self._thread is not None:
            self._thread.join()

    def _evict_alone(self) -> None:
        with contextlib.suppress(OSError), _alone(self._root / "lock", self._access):
            self._evict()

    def _evict(self) -> None:
        files, total = [], 0
        for namespace in _folders(self._root):
            for folder in _folders(namespace):
                for entry in _entries(folder):
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    files.append((status.st_mtime, status.st_size, entry.path))
                    total += status.st_size
        self._sweep()
        if total <= self.bytes * _BEGIN:
            return
        files.sort()
        for _, size, path in files:
            if total <= self.bytes * _END:
                break
            with contextlib.suppress(OSError):
                Path(path).unlink()
                self.evicted += 1
            total -= size

    def _sweep(self) -> None:
        for entry in _entries(self._root / "incoming"):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat().st_mtime <= _STALE_S:
                    continue
                if entry.is_dir():
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    Path(entry.path).unlink()


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from entries


def _folders(folder: Path) -> Iterator[Path]:
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False) and entry.name != "incoming":
            yield Path(entry.path)


@contextlib.contextmanager
def _alone(path: Path, access: Access) -> Iterator[None]:
    """One process at a time; the lock ends with its process."""
    descriptor = access.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

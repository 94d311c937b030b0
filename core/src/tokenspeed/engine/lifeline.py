"""No process outlives the others: each rank watches pipes that close when their holder dies, however it dies."""

from __future__ import annotations

import os
import select
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

__all__ = ["EXIT_ORPHANED", "Lifeline"]

#: Exit status of a rank that ended because the server or another rank was gone.
EXIT_ORPHANED = 70


class Lifeline:
    """A thread that ends this process at once when one of ``holders`` is gone.

    The main thread may be deep in a collective with a dead peer, so nothing is unwound: the process exits and the system gives back
    what it held.

    Args:
        holders: file descriptors of pipe ends to who holds the other end; nothing is ever written to them.
        directory: private directory to remove on the way out, as the server may no longer be there to do it.
    """

    def __init__(self, holders: Mapping[int, str], directory: Path) -> None:
        self._holders = dict(holders)
        self._directory = directory
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The process ends in good order: whoever goes first from now on is no loss."""
        os.write(self._stop_write, b"\0")
        self._thread.join()

    def wait(self, holder: str, timeout_s: float) -> None:
        """After ``stop``: wait until ``holder`` has ended."""
        fds = [fd for fd, name in self._holders.items() if name == holder]
        select.select(fds, [], [], timeout_s)

    def _watch(self) -> None:
        ready, _, _ = select.select([*self._holders, self._stop_read], [], [])
        if self._stop_read in ready:
            return
        gone = " and ".join(self._holders[fd] for fd in ready)
        sys.stderr.write(f"engine process {os.getpid()}: {gone} is gone; ending\n")
        sys.stderr.flush()
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(EXIT_ORPHANED)

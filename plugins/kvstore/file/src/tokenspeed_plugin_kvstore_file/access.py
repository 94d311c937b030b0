"""Who may read the pages: they are as private as the prompts that they were computed from."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["Access"]


class Access:
    """Makes folders and files for this user alone, or with ``group`` for the group of the directory, whatever the umask says."""

    def __init__(self, *, group: bool) -> None:
        # Set-group-id: what others of the group make in a folder belongs to the group too.
        self._folder, self._file = (0o2770, 0o660) if group else (0o700, 0o600)
        self._group = group

    def make_folder(self, path: Path) -> None:
        """Make ``path`` where it is missing, and its parents; one that is there keeps its mode."""
        if path.is_dir():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=self._folder & 0o777)
        except FileExistsError:  # another process made it in between
            return
        if self._group:
            path.chmod(self._folder)

    def open(self, path: str | Path, flags: int) -> int:
        """Open a file, which is made where ``flags`` say so; the descriptor."""
        descriptor = os.open(path, flags | os.O_CLOEXEC, self._file)
        if self._group and os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, self._file)
        return descriptor

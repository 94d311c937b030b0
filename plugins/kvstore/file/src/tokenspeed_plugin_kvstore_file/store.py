"""Frames as files: ``DIRECTORY/NAMESPACE/HH/HASH``, written under another name and renamed, read whole or not at all.

Many processes share a directory without talking to each other: a rename is atomic, a frame is never changed in place, and a file that another process
removes is a miss. A file's modification time is its last use, by which the least recently used go when the cap is passed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from tokenspeed.interfaces.kvstore import Frame, KVNamespace, KVStore, KVStoreContext
from tokenspeed_plugin_kvstore_file.access import Access
from tokenspeed_plugin_kvstore_file.eviction import Cap
from tokenspeed_plugin_kvstore_file.place import INCOMING, root_of, unwritable

__all__ = ["FileStore"]

#: A file is marked as used at most so often: a mark is a write of its inode.
_MARK_EVERY_S = 30.0


class FileStore(KVStore):
    """Options: ``directory`` (made where it is missing), ``size_mb`` (cap over all namespaces and processes), ``fsync``, ``group``."""

    def __init__(self, ctx: KVStoreContext) -> None:
        super().__init__(ctx)
        self._root = root_of(ctx.options)
        self._fsync = bool(ctx.options.get("fsync", False))
        self._access = Access(group=bool(ctx.options.get("group", False)))
        self._incoming = self._root / INCOMING
        try:
            self._access.make_folder(self._root)
            self._access.make_folder(self._incoming)
            probe = self._incoming / f"probe-{os.getpid()}-{id(self):x}"
            os.close(self._access.open(probe, os.O_CREAT | os.O_WRONLY))
            probe.unlink()
        except OSError as error:
            raise unwritable(self._root, error.strerror or str(error)) from error
        self._cap = Cap(self._root, int(ctx.options.get("size_mb", 10240)) << 20, self._access)
        self._names = itertools.count()

    @property
    def counters(self) -> dict[str, int]:
        return {"evicted": self._cap.evicted}

    def exists(self, namespace: KVNamespace, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        end = time.monotonic() + timeout_s
        return [time.monotonic() < end and self._path(namespace, key).is_file() for key in keys]

    def get_into(
        self, namespace: KVNamespace, keys: Sequence[bytes], frames: Sequence[Frame], timeout_s: float
    ) -> list[bool]:
        end = time.monotonic() + timeout_s
        return [
            time.monotonic() < end and _read(self._path(namespace, key), frame)
            for key, frame in zip(keys, frames, strict=True)
        ]

    def put(
        self, namespace: KVNamespace, keys: Sequence[bytes], frames: Sequence[Frame], timeout_s: float
    ) -> list[bool]:
        end = time.monotonic() + timeout_s
        self._describe(namespace)
        return [
            time.monotonic() < end and self._write(self._path(namespace, key), frame)
            for key, frame in zip(keys, frames, strict=True)
        ]

    def delete(self, namespace: KVNamespace, timeout_s: float) -> int:  # noqa: ARG002
        folder = self._root / namespace.id
        count = sum(1 for path in folder.glob("??/*"))
        # Out of sight at once, whatever others write meanwhile; then removed.
        grave = self._incoming / f"deleted-{namespace.id}-{os.getpid()}-{next(self._names)}"
        try:
            folder.rename(grave)
        except FileNotFoundError:
            return 0
        shutil.rmtree(grave, ignore_errors=True)
        return count

    def close(self) -> None:
        self._cap.wait()

    def _path(self, namespace: KVNamespace, key: bytes) -> Path:
        name = key.hex()
        return self._root / namespace.id / name[:2] / name

    def _describe(self, namespace: KVNamespace) -> None:
        """Say in the folder what its digest stands for."""
        note = self._root / namespace.id / "namespace.json"
        if not note.exists():
            self._access.make_folder(note.parent)
            self._replace(note, namespace.describe().encode() + b"\n")

    def _write(self, path: Path, frame: Frame) -> bool:
        if len(frame) > self._cap.bytes or not self._cap.room:
            return False
        try:
            self._replace(path, frame.data)
        except IsADirectoryError:  # put there by somebody else: this page cannot be kept, others can
            return False
        self._cap.added(len(frame))
        return True

    def _replace(self, path: Path, data: bytes | memoryview) -> None:
        temporary = self._incoming / f"{path.name}-{os.getpid()}-{id(self):x}-{next(self._names)}"
        try:
            with os.fdopen(self._access.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "wb") as file:
                file.write(data)
                if self._fsync:
                    file.flush()
                    os.fsync(file.fileno())
            try:
                temporary.rename(path)
            except FileNotFoundError:  # the first of its folder, or the namespace was deleted in between
                self._access.make_folder(path.parent)
                temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _read(path: Path, frame: Frame) -> bool:
    """Whether ``path`` is a file of the frame's length; never waits for one that is something else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != len(frame):
            return False
        view, done = frame.data, 0
        while done < len(view) and (count := os.readv(descriptor, [view[done:]])):
            done += count
        if time.time() - status.st_mtime > _MARK_EVERY_S:
            os.utime(descriptor)
        return done == len(view)
    except OSError:
        return False
    finally:
        os.close(descriptor)

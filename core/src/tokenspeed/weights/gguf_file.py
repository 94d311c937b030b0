"""Header of a GGUF file: metadata and where its tensors lie. Torch-free, and fast enough to run at every start.

``gguf.GGUFReader`` takes about two seconds for a vocabulary of 50k tokens (it wraps every array element in a numpy view); the server and each
engine process read the header, so it is parsed here, in one pass over a memory map. Layout: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tokenspeed.errors import ModelError

__all__ = ["GgufFile", "GgufTensor", "is_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_DEFAULT_ALIGNMENT = 32
# Value types of the specification that have a fixed size: struct code by type number.
_SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# No header of a real model is near this; a larger count means a damaged file.
_MAX_COUNT = 1 << 28


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        shape: dimensions as the file has them, fastest varying first (the reverse of torch's order).
        type: number of the GGML type (``gguf.GGMLQuantizationType``).
        offset: first byte, counted from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class GgufFile:
    """An open GGUF file; use as a context manager.

    Attributes:
        path: the file.
        metadata: key to value; arrays are lists.
        tensors: by name.

    Raises:
        ModelError: the file is no GGUF file, is cut short, is big-endian or has an unknown version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {self.path}: {error}") from error
        try:
            self.metadata, self.tensors = _read_header(self.data)
        except _DamageError as damage:
            self.data.close()
            raise ModelError(f"{self.path} is not a usable GGUF file: {damage}") from None
        except (struct.error, UnicodeDecodeError) as error:
            self.data.close()
            what = "it ends inside its header" if isinstance(error, struct.error) else "a name in it is not UTF-8 text"
            raise ModelError(f"{self.path} is damaged or incomplete: {what}; download it again") from error

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata value of ``key``."""
        return self.metadata.get(key, default)

    def close(self) -> None:
        """Release the memory map."""
        self.data.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An error's frames may hold views of the map, which then ends with them; the error is what the user must see, not the map's complaint.
        with suppress(BufferError) if error is not None else nullcontext():
            self.close()


def is_gguf(path: Path) -> bool:
    """Whether the file begins like a GGUF file."""
    try:
        with path.open("rb") as file:
            return file.read(4) == _MAGIC
    except OSError:
        return False


class _DamageError(Exception):
    """What is wrong with a header."""


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return value

    def count(self) -> int:
        value: int = self.scalar("Q")
        if value > _MAX_COUNT:
            raise _DamageError(f"a count of {value} at byte {self.at - 8} is not plausible")
        return value

    def string(self) -> str:
        length = self.count()
        begin = self.at
        self.at += length
        if self.at > len(self.data):
            raise _DamageError(f"it ends inside a string at byte {begin}")
        return self.data[begin : self.at].decode("utf-8")

    def strings(self, count: int) -> list[str]:
        """Arrays of strings are the bulk of a header (tokens, merges): the same as ``string`` with everything bound to locals."""
        data, at, end = self.data, self.at, len(self.data)
        read_length: Callable[..., tuple[Any, ...]] = struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            begin = at + 8
            at = begin + read_length(data, at)[0]
            if at > end:
                raise _DamageError(f"it ends inside an array of strings at byte {begin}")
            # Tokens of damaged vocabularies may hold a cut UTF-8 sequence: keep the position, lose the bytes.
            out.append(data[begin:at].decode("utf-8", "replace"))
        self.at = at
        return out

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner: int = self.scalar("I")
            count = self.count()
            if inner == _STRING:
                return self.strings(count)
            if inner in _SCALARS:
                code = f"<{count}{_SCALARS[inner]}"
                values = list(struct.unpack_from(code, self.data, self.at))
                self.at += struct.calcsize(code)
                return values
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise _DamageError(f"value type {kind} at byte {self.at} is unknown")
        return self.scalar(_SCALARS[kind])


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if data[:4] != _MAGIC:
        raise _DamageError("it does not begin with the letters GGUF")
    cursor = _Cursor(data)
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise _DamageError(f"version {version} is not one of {_VERSIONS} (a big-endian or very old file)")
    tensor_count = cursor.count()
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count()):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = []
    for _ in range(tensor_count):
        name = cursor.string()
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))
        kind = cursor.scalar("I")
        infos.append((name, shape, kind, cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if alignment <= 0:
        raise _DamageError(f"general.alignment is {alignment}")
    base = (cursor.at + alignment - 1) // alignment * alignment
    return metadata, {name: GgufTensor(name, shape, kind, base + offset) for name, shape, kind, offset in infos}

"""What ``kernels bench`` measured: a JSON file whose figures count only on the device and with the versions that they were taken with.

{"format": 1, "devices": {"cuda (NVIDIA H200, ...); torch 2.11.0; triton 3.6.0": [
    {"operation": "gemm.linear", "dtype": "bf16", "shape": {"k": 4096, "n": 6144}, "rows": [1, 8], "date": "2026-11-29",
     "us": {"kernels-triton:triton": 30.1, "builtin:torch": 34.3}, "each": {"kernels-triton:triton": [14.1, 16.0], "builtin:torch": [17.3, 17.0]}}]}}

``us`` is the sum over ``rows``, which decides; ``each`` is the evidence. Operations on pages also have ``layout``, and ``kv`` where their type is another.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed.errors import ConfigError

__all__ = ["KernelTimes", "Measurement", "device_key"]

_FORMAT = 1
_MAX_BYTES = 64 << 20
_VERSIONS = ("torch", "triton")


def device_key(description: str) -> str:
    """The device by its platform's description, and the versions of what compiles kernels for it."""
    parts = [description]
    for name in _VERSIONS:
        try:
            parts.append(f"{name} {importlib.metadata.version(name).partition('+')[0]}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured request: ``us`` is microseconds a call by candidate (``plugin:name``), the sum over ``rows``; ``each`` has them one by one. ``layout`` is
    that of KV pages, ``kv`` their element type where it is not ``dtype``."""

    operation: str
    dtype: str
    shape: Mapping[str, int]
    rows: tuple[int, ...]
    date: str
    us: Mapping[str, float]
    each: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    layout: str = ""
    kv: str = ""

    def plain(self) -> dict[str, Any]:
        """As it stands in the file."""
        fields = {"operation": self.operation, "dtype": self.dtype, "shape": dict(sorted(self.shape.items()))}
        fields |= {name: text for name, text in (("layout", self.layout), ("kv", self.kv)) if text}
        each = {"each": {name: list(us) for name, us in self.each.items()}} if self.each else {}
        return {**fields, "rows": list(self.rows), "date": self.date, "us": dict(self.us), **each}


class KernelTimes:
    """The measurements of one device.

    Args:
        key: of ``device_key``.
    """

    def __init__(self, key: str, measurements: Sequence[Measurement] = ()) -> None:
        self.key = key
        self._found = {_identity(m.operation, m.dtype, m.shape, m.layout, m.kv): m for m in measurements}

    def __len__(self) -> int:
        return len(self._found)

    @classmethod
    def load(cls, path: str, key: str) -> KernelTimes:
        """What a file holds for ``key``, which may be nothing. Raises ``ConfigError`` for a file that cannot be read or is of another format."""
        return cls(key, [_measurement(path, entry) for entry in _read(path)["devices"].get(key, [])])

    @staticmethod
    def devices(path: str) -> list[str]:
        """The keys that a file has figures for."""
        return sorted(_read(path)["devices"])

    def find(
        self, operation: str, dtype: str, shape: Mapping[str, int], layout: str = "", kv: str = ""
    ) -> Measurement | None:
        """The measurement of exactly this request."""
        return self._found.get(_identity(operation, dtype, shape, layout, kv))

    def add(self, measurement: Measurement) -> None:
        """Take a measurement in; a former one of the same request is replaced."""
        m = measurement
        self._found[_identity(m.operation, m.dtype, m.shape, m.layout, m.kv)] = m

    def save(self, path: str) -> None:
        """Write the file; what it holds of other devices stays."""
        new: dict[str, Any] = {"format": _FORMAT, "devices": {}}
        whole = _read(path) if Path(path).exists() else new
        whole["devices"][self.key] = [m.plain() for m in self._found.values()]
        Path(path).write_text(json.dumps(whole, indent=1) + "\n")


_Identity = tuple[str, str, tuple[tuple[str, int], ...], str, str]


def _identity(operation: str, dtype: str, shape: Mapping[str, int], layout: str, kv: str) -> _Identity:
    return operation, dtype, tuple(sorted(shape.items())), layout, kv


def _read(path: str) -> dict[str, Any]:
    file = Path(path)
    if file.exists() and not file.is_file():  # a device has no end
        raise ConfigError(f"--kernel-times {path}: is no regular file")
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"--kernel-times {path}: is larger than {_MAX_BYTES} bytes")
        whole = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"kernel times {path} cannot be read: {error}") from error
    if not isinstance(whole, dict) or whole.get("format") != _FORMAT or not isinstance(whole.get("devices"), dict):
        raise ConfigError(f"kernel times {path}: not written by `tokenspeed kernels bench --save` of this version")
    return whole


def _measurement(path: str, entry: Any) -> Measurement:
    try:
        return Measurement(
            operation=str(entry["operation"]),
            dtype=str(entry["dtype"]),
            shape={str(name): int(size) for name, size in entry["shape"].items()},
            rows=tuple(int(rows) for rows in entry["rows"]),
            date=str(entry["date"]),
            us={str(name): float(us) for name, us in entry["us"].items()},
            each={str(name): tuple(map(float, us)) for name, us in entry.get("each", {}).items()},
            layout=str(entry.get("layout", "")),
            kv=str(entry.get("kv", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"kernel times {path}: a measurement lacks or misstates {error}") from error

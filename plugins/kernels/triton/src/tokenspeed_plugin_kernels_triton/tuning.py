"""Tile shapes of the small-m products: those that a search on this very card found (``tokenspeed tune-gemm``), generic ones on any other.

The files in ``tuned``, and one that the option ``tiles`` names, carry their evidence: the card, versions, date and times. A tile counts only on the card
that it was found on, and only where its shared memory fits into what a program of the device may have. Imports neither torch nor Triton.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from tokenspeed.errors import ConfigError
from tokenspeed_plugin_kernels_triton.limits import shared_memory_limit

__all__ = ["MAX_ROWS", "GemmConfig", "Tuning", "load_tuning", "tells", "tells_gated"]

#: Products of more rows go to the vendor's library: from here on its tiles win.
MAX_ROWS = 32
_ROWS = {1: "1 row", 16: "2 to 16 rows", 32: "17 to 32 rows"}


@dataclass(frozen=True)
class GemmConfig:
    """Rows are padded to ``bm`` (1: the register kernels); ``bn`` weight rows and ``bk`` columns a tile; K is cut in ``split_k`` pieces.

    ``ahead``: tiles of weights that are asked for before they are needed, in registers (``bm`` 1: 0 or 1) or in the L2 cache. ``programs``: of each
    multiprocessor, for the kernel whose programs walk over the rows; 0 is any other.
    """

    bm: int
    bn: int
    bk: int
    split_k: int
    warps: int
    stages: int
    ahead: int = 0
    programs: int = 0

    @property
    def shared_bytes(self) -> int:
        """Bound on the shared memory of a program, for elements of two bytes: the stages of both operands, and the padding that some targets add."""
        if (
            self.bm == 1
        ):  # sums between warps, and tiles where the compiler's pipeline copies ahead; twice for gate and up
            return 4096 + (self.stages * self.bn * self.bk * 4 if self.stages > 1 else 0)
        tiles = self.stages * (self.bn + self.bm) * self.bk * 2
        return tiles + tiles // 32 + 64

    def __str__(self) -> str:
        parts = [f"{self.bn}x{self.bk}"]
        parts += [f"in {self.stages} stages"] if self.bm > 1 else []
        parts += [f"split {self.split_k}"] if self.split_k > 1 else []
        parts += [f"{self.programs} programs a multiprocessor"] if self.programs else []
        return " ".join(parts)


#: Good anywhere, of little shared memory; nobody searched for them on any card.
_GENERIC = {
    1: GemmConfig(1, 4, 1024, 1, 4, 1),
    16: GemmConfig(16, 64, 64, 1, 4, 3),
    32: GemmConfig(32, 64, 64, 1, 4, 3),
}
_GENERIC_GATED = GemmConfig(1, 2, 1024, 1, 4, 1)


class Tuning:
    """Tiles of one device.

    Args:
        record: contents of a file: ``device``, versions, ``date`` and ``measured``, a list of shapes with their best configurations; ``None`` is none.
        limit: bytes of shared memory that a program may have.
    """

    def __init__(self, record: Mapping[str, Any] | None, limit: int) -> None:
        self.limit = limit
        self.device = str(record["device"]) if record is not None else ""
        self.evidence = (
            f"{record['date']}, torch {record['torch']}, triton {record['triton']}" if record is not None else ""
        )
        self.refused: list[GemmConfig] = []
        self._measured: list[tuple[int, int, bool, GemmConfig]] = []
        for entry in record["measured"] if record is not None else ():
            best = [_config(one) for one in entry["best"]]
            fitting = [config for config in best if config.shared_bytes <= limit]
            self.refused += best[: best.index(fitting[0]) if fitting else len(best)]
            # an entry whose tiles are all too large is as one that was not searched
            self._measured += [(entry["n"], entry["k"], entry["gated"], config) for config in fitting[:1]]
        self._answers: dict[tuple[int, int, int, bool], GemmConfig] = {}

    def gemm(self, m: int, n: int, k: int, gated: bool = False) -> GemmConfig:
        """The configuration for ``(m, k) x (n, k)``, 1 <= m <= ``MAX_ROWS``; ``gated`` is of one row, and n counts gate and up rows."""
        bm = 1 if m == 1 else 16 if m <= 16 else 32
        key = (bm, n, k, gated)
        if key not in self._answers:
            self._answers[key] = self._nearest(*key)
        return self._answers[key]

    def _nearest(self, bm: int, n: int, k: int, gated: bool) -> GemmConfig:
        """What was found for the shape or the one most like it."""

        def distance(entry: tuple[int, int, bool, GemmConfig]) -> float:
            return abs(math.log(entry[0] / n)) + abs(math.log(entry[1] / k))

        found = [e for e in self._measured if e[3].bm == bm and (bm > 1 or e[2] == gated)]
        generic = _GENERIC_GATED if gated and bm == 1 else _GENERIC[bm]
        config = min(found, key=distance)[3] if found else generic
        if config.programs == 0 and bm == 1:
            config = replace(config, bk=min(config.bk, max(256, 1 << (k - 1).bit_length())))
        return config


def _config(entry: Mapping[str, Any]) -> GemmConfig:
    return GemmConfig(**{field.name: int(entry.get(field.name, 0)) for field in fields(GemmConfig)})


@functools.cache
def _packaged() -> dict[str, Mapping[str, Any]]:
    """Contents of the files in ``tuned`` by the device they are of."""
    folder = resources.files(__package__).joinpath("tuned")
    records = [json.loads(file.read_text()) for file in folder.iterdir() if file.name.endswith(".json")]
    return {str(record["device"]): record for record in records}


def _read(path: str) -> Mapping[str, Any]:
    """A file that a user names. Raises ``ConfigError`` for one that is not what ``tune-gemm`` writes."""
    try:
        record: Mapping[str, Any] = json.loads(Path(path).read_text())
        Tuning(record, 1 << 30)
    except OSError as error:
        raise ConfigError(f"tiles {path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"tiles {path}: not written by `tokenspeed tune-gemm`: {error!r}") from error
    return record


def load_tuning(device: str, limit: int, path: str = "") -> Tuning:
    """Tiles for a card by its name, as ``torch.cuda.get_device_name`` gives it.

    Args:
        limit: bytes of shared memory that a program of it may have.
        path: a file of ``tokenspeed tune-gemm`` that goes before those of the package.

    Raises:
        ConfigError: ``path`` cannot be read, or is of another card.
    """
    if not path:
        return Tuning(_packaged().get(device), limit)
    record = _read(path)
    if device and record["device"] != device:
        raise ConfigError(
            f"tiles {path} are of {record['device']}, this device is {device}: search it with `tokenspeed tune-gemm`"
        )
    return Tuning(record, limit)


def _lines(tuning: Tuning, n: int, k: int, gated: bool) -> str:
    parts = []
    for bm, rows in _ROWS.items():
        if gated and bm > 1:
            parts.append("more rows: gemm.linear, then the activation")
            break
        config = tuning.gemm(bm, n, k, gated)
        parts.append(f"{rows} {config}" + (f" ({config.shared_bytes / 1024:.0f} KiB)" if bm > 1 else ""))
    return "; ".join(parts)


def _told(
    capability: Sequence[int], device: str, shape: Mapping[str, int], options: Mapping[str, Any], gated: bool
) -> str:
    limit = shared_memory_limit(tuple(capability))
    here = ".".join(str(part) for part in capability)
    path = str(options.get("tiles", ""))
    n, k = shape.get("n", 4096), shape.get("k", 4096)
    whose = "a program has" if capability else "a program of an unknown device (--arch tells it) is given"
    lines = [f"{whose} {limit / 1024:.0f} KiB of shared memory; tiles of {n} x {k}, weight rows x columns:"]
    records = [_read(path)] if path else list(_packaged().values())
    generic = True
    for record in records:
        tuning = Tuning(record, limit)
        refused = sorted({f"{c} ({c.shared_bytes / 1024:.0f} KiB)" for c in tuning.refused})
        same = tuning.device == device or f"({tuning.device}," in device
        if path or same or (not device and record["capability"] == here):
            generic = generic and not (path or device)
            lines.append(f"on {tuning.device} ({tuning.evidence}): {_lines(tuning, n, k, gated)}")
            lines += [f"refused for want of shared memory: {', '.join(refused)}"] if refused else []
        else:
            unfit = f", and {len(refused)} of them would not fit" if refused else ""
            lines.append(f"those searched on {tuning.device} are for that card alone{unfit}")
    if generic:
        lines.append(f"on a card that was not searched: {_lines(Tuning(None, limit), n, k, gated)}")
    return "\n".join(lines)


def tells(capability: Sequence[int], device: str, shape: Mapping[str, int], options: Mapping[str, Any]) -> str:
    """``KernelSpec.tells`` of ``gemm.linear``: the tiles, where they are from, and which a device's shared memory refused."""
    return _told(capability, device, shape, options, False)


def tells_gated(capability: Sequence[int], device: str, shape: Mapping[str, int], options: Mapping[str, Any]) -> str:
    """``KernelSpec.tells`` of ``gemm.linear_silu_mul``."""
    return _told(capability, device, shape, options, True)

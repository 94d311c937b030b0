"""Tile shapes of the small-m products, from the files in ``tuned``: what a search on a device found (``bench/bench_gemm.py``), with its evidence.

A shape that was not searched takes the tiles of the nearest one that was, and a device without a file those of the H200.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

__all__ = ["MAX_ROWS", "GemmConfig", "Tuning", "load_tuning"]

#: Products of more rows go to the vendor's library: from here on its tiles win.
MAX_ROWS = 32
_DEFAULT = "nvidia-h200"


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


class Tuning:
    """Answers from one device's file.

    Args:
        record: the file's contents: ``device``, versions, and ``measured``, a list of shapes with their best configurations.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        self.device = str(record["device"])
        self._measured = [
            (entry["rows"], entry["n"], entry["k"], entry["gated"], _config(entry["best"][0]))
            for entry in record["measured"]
        ]
        self._answers: dict[tuple[int, int, int, bool], GemmConfig] = {}

    def gemm(self, m: int, n: int, k: int, gated: bool = False) -> GemmConfig:
        """The configuration for ``(m, k) x (n, k)``, 1 <= m <= ``MAX_ROWS``; ``gated`` is of one row, and n counts gate and up rows."""
        bm = 1 if m == 1 else 16 if m <= 16 else 32
        key = (bm, n, k, gated)
        if key not in self._answers:
            self._answers[key] = self._nearest(*key)
        return self._answers[key]

    def _nearest(self, bm: int, n: int, k: int, gated: bool) -> GemmConfig:
        def distance(entry: tuple[int, int, int, bool, GemmConfig]) -> float:
            return abs(math.log(entry[1] / n)) + abs(math.log(entry[2] / k))

        found = min((e for e in self._measured if e[4].bm == bm and (bm > 1 or e[3] == gated)), key=distance)
        config = found[4]
        if config.programs == 0 and bm == 1:
            config = replace(config, bk=min(config.bk, max(256, 1 << (k - 1).bit_length())))
        return config


def _config(entry: dict[str, Any]) -> GemmConfig:
    return GemmConfig(**{name: int(value) for name, value in entry.items() if name != "us"})


@functools.cache
def load_tuning(device: str) -> Tuning:
    """The file of a device by its name, as ``torch.cuda.get_device_name`` gives it; the H200's for others."""
    folder = resources.files(__package__).joinpath("tuned")
    for name in (device.lower().replace(" ", "-"), _DEFAULT):
        file = folder.joinpath(f"{name}.json")
        if file.is_file():
            return Tuning(json.loads(file.read_text()))
    raise FileNotFoundError(f"{folder} holds no {_DEFAULT}.json")

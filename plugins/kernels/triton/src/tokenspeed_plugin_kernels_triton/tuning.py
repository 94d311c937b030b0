"""Tile shapes of the small-m products: the best of a search on an H200 (``bench/bench_gemm.py``), used on every device until one is searched itself."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GATED", "MAX_ROWS", "GemmConfig", "gemm_config"]

#: Products of more rows go to the vendor's library: from here on its tiles win.
MAX_ROWS = 32


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


def gemm_config(m: int, n: int, k: int) -> GemmConfig:
    """The configuration for ``(m, k) x (n, k)``, 1 <= m <= ``MAX_ROWS``."""
    if m == 1:
        if k >= 8192 or n <= 4096:
            return GemmConfig(1, 4, 1024, 1, 2, 3)
        if n <= 8192:
            return GemmConfig(1, 16, 512, 1, 8, 1)
        if n <= 65536:
            return GemmConfig(1, 32, 256, 1, 8, 3)
        return GemmConfig(1, 8, 512, 1, 2, 1)
    bm = 16 if m <= 16 else 32
    if k >= 8192:
        return GemmConfig(bm, 64, 128, 4 if bm == 16 else 1, 4, 4 if bm == 16 else 6)
    if n >= 16384:
        return GemmConfig(bm, 64, 128, 1, 4, 3)
    if bm == 16:
        return GemmConfig(bm, 64, 256, 1, 4, 4)
    return GemmConfig(bm, 64, 128, 1, 4, 6)


#: One row times a gate-up weight with its activation: the tile of either half; K is not split.
GATED = GemmConfig(1, 16, 256, 1, 8, 3)

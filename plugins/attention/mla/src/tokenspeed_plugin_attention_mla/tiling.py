"""How the kernel for a number of queries is built."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "HEADS",
    "HEADS_FP32",
    "HEADS_ROCM",
    "TILES",
    "TILES_FP8",
    "TILES_FP32",
    "TILES_ROCM",
    "Tiling",
    "tiling_for",
]


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the kernel is built for a number of queries.

    Attributes:
        kernel: "portable" (``attend``), or "narrow" and "wide" of Hopper, which alone ``queries`` and ``latents`` concern.
        queries: BM of the kernel; ``latents`` is its BN.
        swap: transposed products.
        warps, stages: of a program; tiles that cross pages are fetched ``scattered`` stages ahead.
        residency: programs that share a multiprocessor.
    """

    queries: int
    latents: int
    kernel: str = "portable"
    swap: bool = False
    warps: int = 4
    stages: int = 3
    scattered: int = 5
    residency: int = 1


#: By queries of a row, ascending: registers and shared memory of sm_90 allow these (README).
TILES: tuple[Tiling, ...] = (
    Tiling(queries=16, latents=32, warps=4, stages=3, residency=2),
    Tiling(queries=32, latents=64, warps=8, stages=3),
    Tiling(queries=64, latents=64, warps=8, stages=2, scattered=3),
)

#: Latents of fp8 are widened in registers, which larger tiles have not got.
TILES_FP8: tuple[Tiling, ...] = (
    Tiling(queries=16, latents=32, warps=8, stages=3),
    Tiling(queries=32, latents=32, warps=8, stages=3),
)

#: Twice the bytes: shared memory has room for small tiles alone.
TILES_FP32: tuple[Tiling, ...] = (Tiling(queries=16, latents=16, warps=4, stages=1, scattered=1),)

#: CDNA 3 has 64 KiB of local memory.
TILES_ROCM: tuple[Tiling, ...] = (Tiling(queries=16, latents=16, warps=4, stages=1, scattered=1, residency=2),)

#: (query tokens, keys, warps) of a program over expanded latents.
HEADS, HEADS_ROCM = (128, 64, 8), (64, 64, 4)

#: Products in fp32 are unrolled into single multiplications, and compiling takes as long as there are of them: tiles of 128 x 64 have 20,528, these 2,568.
HEADS_FP32 = (32, 16, 4)


def tiling_for(queries: int, tiles: tuple[Tiling, ...] = TILES) -> Tiling:
    """The smallest tile that holds ``queries``, or the largest there is."""
    return next((tile for tile in tiles if tile.queries >= queries), tiles[-1])

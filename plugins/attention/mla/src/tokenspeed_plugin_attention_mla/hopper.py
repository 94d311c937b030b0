"""Launches of the kernels for Hopper: when they serve, and the descriptors that its copies take."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tokenspeed_plugin_attention_mla.tiling import Tiling

__all__ = ["HOPPER_TILES", "HopperKernels", "serves"]

#: By queries of a row, ascending.
HOPPER_TILES: tuple[Tiling, ...] = (
    Tiling(kernel="narrow", queries=16, latents=64),
    Tiling(kernel="narrow", queries=32, latents=64),
    Tiling(kernel="wide", queries=64, latents=128),
)

_RANK, _ROPE, _TILE = 512, 64, 64


@functools.cache
def _kernels() -> tuple[Any, Any] | None:
    """The two kernels, or None where this Triton lacks what they are written with."""
    try:
        from tokenspeed_plugin_attention_mla.hopper_narrow import attend_narrow
        from tokenspeed_plugin_attention_mla.hopper_wide import attend_wide
    except (ImportError, AttributeError):
        return None
    return attend_narrow, attend_wide


def serves(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, *, rank: int, rope: int, page_size: int
) -> bool:
    """Whether the kernels of this module do: compute capability 9.0, bf16, latents of 512 + 64 elements, pages of a multiple of 64 tokens."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
        and dtype == kv_dtype == torch.bfloat16
        and (rank, rope) == (_RANK, _ROPE)
        and page_size % _TILE == 0
        and _kernels() is not None
    )


class HopperKernels:
    """Keeps the descriptors of each layer's latents."""

    def __init__(self) -> None:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        self._layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        self._weights = {
            queries: gl.NVMMASharedLayout(swizzle_byte_width=2 * queries, element_bitwidth=16, rank=2)
            for queries in (16, 32)
        }
        self._descriptor = TensorDescriptor
        self._latents: dict[tuple[int, int], tuple[Any, Any]] = {}

    def _boxes(self, rows: torch.Tensor, count: int, columns: int) -> Any:
        return self._descriptor.from_tensor(rows, [count, columns], self._layout)

    def _of_latents(self, latents: torch.Tensor) -> tuple[Any, Any]:
        """REQUIRES: pages that follow one another without gaps."""
        key = latents.data_ptr(), latents.shape[0]
        found = self._latents.get(key)
        if found is None:
            rows = latents.view(-1, _RANK + _ROPE)
            found = self._latents[key] = self._boxes(rows, _TILE, 256), self._boxes(rows, _TILE, _ROPE)
        return found

    def launch(
        self,
        tiling: Tiling,
        programs: int,
        q: torch.Tensor,
        latents: torch.Tensor,
        page_table: torch.Tensor,
        *work: Any,
        page_size: int,
        tiles: int,
        scale: float,
        out_scale: float,
    ) -> None:
        """``work``: sequence lengths, query starts, items, ranges, output, partial sums, their maxima, heads, queries of a part."""
        kernels = _kernels()
        assert kernels is not None, "asked for without serves()"
        narrow, wide = kernels
        queries = q.view(-1, _RANK + _ROPE)
        boxes = self._boxes(queries, tiling.queries, 256)
        *tensors, heads, part_stride = work
        rest = (heads, part_stride, page_table.stride(0), page_size, tiles, scale, out_scale)
        if tiling.kernel == "wide":
            _, pieces = self._of_latents(latents)
            wide[(programs,)](boxes, pieces, q, page_table, *tensors, *rest, num_warps=4, maxnreg=168)
            return
        narrow[(programs,)](
            boxes, self._boxes(queries, tiling.queries, _ROPE), *self._of_latents(latents), page_table, *tensors, *rest,
            QUERIES=tiling.queries, STAGES=2, P_LAYOUT=self._weights[tiling.queries], num_warps=4, maxnreg=232,
        )  # fmt: skip

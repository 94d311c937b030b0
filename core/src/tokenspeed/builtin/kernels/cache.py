"""Writing keys and values into pages, and whole pages: copied and zeroed."""

from __future__ import annotations

import torch

__all__ = ["copy", "stored", "write", "write_latent", "zero"]


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` as pages of ``dtype`` hold it. fp8 (e4m3) saturates at its largest value, 448, where a plain conversion makes NaN; NaN stays NaN."""
    if dtype is torch.float8_e4m3fn:
        x = x.clamp(-448.0, 448.0)
    return x.to(dtype)


def write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: str,
) -> None:
    """Store k (T, Hk, D) and v (T, Hk, Dv) at ``slot_mapping`` (T) int64 = page * page_size + offset; -1 stores nothing."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    for new, cache in ((k, k_cache), (v, v_cache)):
        pages = cache if layout == "NHD" else cache.transpose(1, 2)  # (pages, page_size, Hk, D) either way, a view
        page_size = pages.shape[1]
        pages[slots // page_size, slots % page_size] = stored(new[kept], cache.dtype)


def write_latent(
    latent: torch.Tensor,
    rope: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: str,
    scale: float = 1.0,
) -> None:
    """Store latent (T, R) and, behind it, rope (T, E), both divided by ``scale``, as rows of ``cache``, pages of one head of R + E."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    pages = cache if layout == "NHD" else cache.transpose(1, 2)
    page_size = pages.shape[1]
    rows = torch.cat((latent, rope), dim=-1)[kept].float() / scale
    pages[slots // page_size, slots % page_size, 0] = stored(rows, cache.dtype)


def copy(pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Page ``target[i]`` becomes page ``source[i]``: pages (P, ...), source and target (n) int64. Where either is -1 nothing happens. Targets are distinct,
    and none is a source."""
    kept = (source >= 0) & (target >= 0)
    pages[target[kept]] = pages[source[kept]]


def zero(pages: torch.Tensor, target: torch.Tensor) -> None:
    """Pages ``target`` (n) int64 of pages (P, ...) become zeros; -1 is none."""
    pages[target[target >= 0]] = 0

"""Rotary embedding and writes into the paged cache."""

from __future__ import annotations

import pytest
import torch
from tokenspeed_plugin_kernels_cpu.runtime import Runtime

DTYPES = [torch.float32, torch.bfloat16]


def table(positions: int, rotary_dim: int) -> torch.Tensor:
    inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(positions)[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def rotated(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x (T, heads, dim) in float64."""
    x = x.double().clone()
    rotary = cos_sin.shape[1]
    cos, sin = (part[:, None] for part in cos_sin.double()[positions].chunk(2, dim=1))
    a, b = (
        (x[..., 0:rotary:2], x[..., 1:rotary:2])
        if interleaved
        else (x[..., : rotary // 2], x[..., rotary // 2 : rotary])
    )
    a, b = a.clone(), b.clone()
    first, second = a * cos - b * sin, b * cos + a * sin
    x[..., :rotary] = (
        torch.stack([first, second], dim=-1).flatten(-2) if interleaved else torch.cat([first, second], dim=-1)
    )
    return x


def normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.double()
    return x if weight is None else x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def make_caches(
    layout: str, pages: int, page_size: int, heads: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (pages, heads, page_size, dim) if layout == "HND" else (pages, page_size, heads, dim)
    return torch.full(shape, 3.0, dtype=dtype), torch.full(shape, 5.0, dtype=dtype)


def tokens_of(cache: torch.Tensor, layout: str) -> torch.Tensor:
    """(slots, heads, dim)"""
    nhd = cache.transpose(1, 2) if layout == "HND" else cache
    return nhd.reshape(-1, *nhd.shape[2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "rotary_dim", "page_size"),
    [(9, 3, 64, 64, 16), (4, 4, 20, 12, 1), (6, 1, 10, 10, 64), (2, 2, 128, 32, 16)],
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_qkv_rope_write(
    runtime: Runtime, q_heads: int, kv_heads: int, head_dim: int, rotary_dim: int, page_size: int, interleaved: bool, with_norm: bool, layout: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    tokens, pages = 70, 2 + 140 // page_size
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim).to(dtype)
    positions, cos_sin = torch.randint(0, 500, (tokens,)), table(500, rotary_dim)
    slots = torch.randperm(pages * page_size)[:tokens]
    slots[5] = -1
    q_norm, k_norm = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype)) if with_norm else (None, None)
    k_cache, v_cache = make_caches(layout, pages, page_size, kv_heads, head_dim, dtype)
    q = runtime.qkv_rope_write(
        qkv,
        positions,
        cos_sin,
        q_heads,
        kv_heads,
        head_dim,
        k_cache,
        v_cache,
        slots,
        layout,
        q_norm,
        k_norm,
        1e-5,
        interleaved,
    )
    heads = qkv.view(tokens, -1, head_dim)
    expected_q = rotated(normed(heads[:, :q_heads], q_norm, 1e-5), cos_sin, positions, interleaved)
    expected_k = rotated(normed(heads[:, q_heads : q_heads + kv_heads], k_norm, 1e-5), cos_sin, positions, interleaved)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 8e-3}
    torch.testing.assert_close(q.double(), expected_q, **tolerance)
    written = slots >= 0
    torch.testing.assert_close(tokens_of(k_cache, layout)[slots[written]].double(), expected_k[written], **tolerance)
    assert torch.equal(tokens_of(v_cache, layout)[slots[written]], heads[written, q_heads + kv_heads :])
    untouched = torch.ones(pages * page_size, dtype=torch.bool)
    untouched[slots[written]] = False
    assert (tokens_of(k_cache, layout)[untouched] == 3.0).all()
    assert (tokens_of(v_cache, layout)[untouched] == 5.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_in_place_on_slices(runtime: Runtime, interleaved: bool, dtype: torch.dtype) -> None:
    """q and k may be slices of fused rows; the rest of the rows stays as it was."""
    fused = torch.randn(40, 5 * 24 + 7).to(dtype)
    before = fused.clone()
    q, k = fused[:, : 3 * 24], fused[:, 3 * 24 : 5 * 24]
    positions, cos_sin = torch.randint(0, 99, (40,), dtype=torch.int32), table(99, 16)
    runtime.rotate(q, k, positions, cos_sin, 24, interleaved)
    expected = rotated(before[:, : 5 * 24].reshape(40, 5, 24), cos_sin, positions.long(), interleaved).flatten(1)
    torch.testing.assert_close(
        fused[:, : 5 * 24].double(), expected, atol=1e-5 if dtype is torch.float32 else 2e-2, rtol=8e-3
    )
    assert torch.equal(fused[:, 5 * 24 :], before[:, 5 * 24 :])


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("source", "target"), [(a, b) for a in DTYPES for b in DTYPES])
def test_cache_write_converts_and_skips(
    runtime: Runtime, layout: str, source: torch.dtype, target: torch.dtype
) -> None:
    """Key and value heads may differ in size, rows may be strided, slot -1 is not written."""
    rows = torch.randn(30, 2 * (16 + 24)).to(source)
    k, v = rows[:, : 2 * 16].unflatten(1, (2, 16)), rows[:, 2 * 16 :].unflatten(1, (2, 24))
    k_cache = make_caches(layout, 5, 8, 2, 16, target)[0]
    v_cache = make_caches(layout, 5, 8, 2, 24, target)[1]
    slots = torch.randperm(40)[:30]
    slots[0] = -1
    runtime.write(k, v, k_cache, v_cache, slots, layout)
    assert torch.equal(tokens_of(k_cache, layout)[slots[1:]], k[1:].to(target))
    assert torch.equal(tokens_of(v_cache, layout)[slots[1:]], v[1:].to(target))
    assert (tokens_of(k_cache, layout) == 3.0).all(-1).all(-1).sum() == 11


def test_indices_out_of_range_are_refused(runtime: Runtime) -> None:
    qkv, cos_sin = torch.randn(3, 4 * 8), table(10, 8)
    k_cache, v_cache = make_caches("HND", 2, 4, 1, 8, torch.float32)
    good = torch.tensor([0, 1, 2])
    for positions, slots, message in [
        (torch.tensor([0, 10, 1]), good, "position"),
        (good, torch.tensor([0, 8, 1]), "slot"),
    ]:
        with pytest.raises(IndexError, match=message):
            runtime.qkv_rope_write(qkv, positions, cos_sin, 2, 1, 8, k_cache, v_cache, slots, "HND")
    with pytest.raises(IndexError, match="slot"):
        runtime.write(torch.randn(1, 1, 8), torch.randn(1, 1, 8), k_cache, v_cache, torch.tensor([8]), "HND")


def test_misfits_are_named(runtime: Runtime) -> None:
    qkv, cos_sin, positions = torch.randn(3, 4 * 8), table(10, 8), torch.tensor([0, 1, 2])
    k_cache, v_cache = make_caches("HND", 2, 4, 1, 8, torch.float32)
    with pytest.raises(ValueError, match="layout is 'DHN'"):
        runtime.qkv_rope_write(qkv, positions, cos_sin, 2, 1, 8, k_cache, v_cache, positions, "DHN")
    with pytest.raises(ValueError, match=r"qkv must be contiguous.*\(3 \+ 2 \* 1\) \* 8"):
        runtime.qkv_rope_write(qkv, positions, cos_sin, 3, 1, 8, k_cache, v_cache, positions, "HND")
    with pytest.raises(ValueError, match="slot_mapping"):
        runtime.qkv_rope_write(qkv, positions, cos_sin, 2, 1, 8, k_cache, v_cache, positions.int(), "HND")
    with pytest.raises(ValueError, match="rotary_dim must be even"):
        runtime.rotate(qkv, qkv, positions, table(10, 16), 8)
    with pytest.raises(ValueError, match="alike but for the last size"):
        runtime.write(torch.randn(1, 1, 8), torch.randn(1, 1, 8), k_cache, v_cache[:1], positions[:1], "HND")

"""Inputs for ``KernelSuite``, by family and mode. Sizes are odd on purpose: nothing is a multiple of a vector or a tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tokenspeed.layers.rotary import RopeConfig, cos_sin_table
from tokenspeed.testing.kernel_case import KernelCase, randn
from tokenspeed.testing.kernel_cases_state import STATE_CASES

__all__ = ["KernelCase", "kernel_cases"]


def kernel_cases(family: str, mode: str) -> list[KernelCase]:
    """The cases of a mode. Raises ``KeyError`` for one that has none."""
    return list(_MAKERS[f"{family}.{mode}"]())


def _gemm_arguments(tokens: int, k: int, n: int, bias: bool, g: torch.Generator) -> list[Any]:
    return [randn(g, tokens, k), randn(g, n, k, scale=k**-0.5), *([randn(g, n)] if bias else [])]


def _gemm() -> Iterator[KernelCase]:
    for tokens, k, n in ((1, 64, 50), (2, 96, 130), (5, 33, 48), (7, 130, 66), (23, 192, 100), (70, 64, 256)):
        for bias in (False, True):
            name = f"{tokens}x{k}x{n}{'-bias' if bias else ''}"
            make = partial(_gemm_arguments, tokens, k, n, bias)
            yield KernelCase(name=name, make=make, shape={"m": tokens, "n": n, "k": k})


def _linear() -> Iterator[KernelCase]:
    yield from _gemm()
    yield KernelCase(
        name="strided rows",
        make=lambda g: [randn(g, 6, 96)[:, :64], randn(g, 40, 64, scale=0.1)],
        shape={"m": 6, "n": 40, "k": 64},
    )


def _norm_arguments(tokens: int, hidden: int, inputs: int, g: torch.Generator) -> list[Any]:
    return [*(randn(g, tokens, hidden, scale=3.0) for _ in range(inputs)), 1 + randn(g, hidden, scale=0.1), 1e-5]


def _norm(inputs: int, written: frozenset[int]) -> Iterator[KernelCase]:
    for tokens, hidden in ((1, 576), (3, 64), (17, 130)):
        make = partial(_norm_arguments, tokens, hidden, inputs)
        yield KernelCase(name=f"{tokens}x{hidden}", make=make, shape={"hidden": hidden}, written=written)


def _gated_arguments(tokens: int, size: int, g: torch.Generator) -> list[Any]:
    return [randn(g, tokens, 2 * size, scale=2.0)]


def _gated() -> Iterator[KernelCase]:
    for tokens, size in ((1, 64), (5, 33), (19, 200)):
        yield KernelCase(name=f"{tokens}x{size}", make=partial(_gated_arguments, tokens, size), shape={"n": size})


def _lookup() -> Iterator[KernelCase]:
    def make(g: torch.Generator) -> list[Any]:
        return [torch.tensor([3, 0, 96, 3, 3]), randn(g, 97, 40)]

    yield KernelCase(name="repeated ids", make=make, shape={"hidden": 40, "vocab": 97})


def _table(rotary: int) -> torch.Tensor:
    return cos_sin_table(RopeConfig(rotary_dim=rotary, max_position=64), 64, torch.device("cpu"))


def _rotate_arguments(dim: int, rotary: int, g: torch.Generator) -> list[Any]:
    positions = torch.tensor([0, 1, 63, 5, 6, 7, 30])
    return [randn(g, 7, 6 * dim), randn(g, 7, 2 * dim), positions, _table(rotary), dim]


def _rotate() -> Iterator[KernelCase]:
    for dim, rotary, interleaved in ((64, 64, False), (64, 64, True), (64, 32, False), (16, 8, True), (64, 0, False)):
        yield KernelCase(
            name=f"{dim}-{rotary}{'-interleaved' if interleaved else ''}",
            make=partial(_rotate_arguments, dim, rotary),
            shape={"head_dim": dim, "rotary_dim": rotary},
            written=frozenset({0, 1}),
            keep=frozenset({3}),
            kwargs={"interleaved": interleaved},
        )


def _cache(g: torch.Generator, layout: str, pages: int, page_size: int, heads: int, dim: int) -> torch.Tensor:
    shape = (pages, page_size, heads, dim) if layout == "NHD" else (pages, heads, page_size, dim)
    return randn(g, *shape)


def _write_arguments(layout: str, k_dim: int, v_dim: int, g: torch.Generator) -> list[Any]:
    k, v = randn(g, 6, 3, k_dim), randn(g, 6, 3, v_dim)
    caches = [_cache(g, layout, 5, 4, 3, dim) for dim in (k_dim, v_dim)]
    return [k, v, *caches, torch.tensor([7, -1, 0, 19, 4, -1]), layout]


def _write_latent() -> Iterator[KernelCase]:
    def make(g: torch.Generator, layout: str, rank: int, rope: int) -> list[Any]:
        rows = randn(g, 6, rank + rope + 8)  # slices of one product's rows
        cache = _cache(g, layout, 5, 4, 1, rank + rope)
        return [rows[:, :rank], rows[:, rank : rank + rope], cache, torch.tensor([7, -1, 0, 19, 4, -1]), layout]

    for layout in ("NHD", "HND"):
        for rank, rope, scale in ((512, 64, 1.0), (48, 16, 0.5)):
            yield KernelCase(
                name=f"{layout}-{rank} and {rope}{'-scaled' if scale != 1 else ''}",
                make=partial(make, layout=layout, rank=rank, rope=rope),
                shape={"rank": rank, "rope": rope},
                layout=layout,
                written=frozenset({2}),
                kwargs={"scale": scale},
            )


def _write() -> Iterator[KernelCase]:
    for layout in ("NHD", "HND"):
        for k_dim, v_dim in ((64, 64), (48, 32)):
            yield KernelCase(
                name=f"{layout}-{k_dim}-{v_dim}",
                make=partial(_write_arguments, layout, k_dim, v_dim),
                shape={"head_dim": k_dim, "v_head_dim": v_dim},
                layout=layout,
                written=frozenset({2, 3}),
            )


def _qkv_rope_write() -> Iterator[KernelCase]:
    variants: list[tuple[str, int, int, int, int, dict[str, Any]]] = [
        ("grouped", 9, 3, 64, 64, {}),
        ("multi-head", 4, 4, 32, 32, {}),
        ("partial", 4, 2, 64, 32, {}),
        ("interleaved", 4, 2, 64, 64, {"interleaved": True}),
        ("no rotation", 4, 2, 64, 0, {}),
        ("head norms", 6, 2, 64, 64, {"eps": 1e-5}),
        ("gates", 6, 2, 64, 32, {"gate": True}),
        ("gates and head norms", 5, 1, 16, 16, {"eps": 1e-5, "gate": True}),
    ]
    for layout in ("NHD", "HND"):
        for name, q, kv, dim, rotary, kwargs in variants:

            def make(
                g: torch.Generator,
                q: int = q,
                kv: int = kv,
                d: int = dim,
                r: int = rotary,
                lay: str = layout,
                norms: bool = "eps" in kwargs,
                gates: bool = "gate" in kwargs,
            ) -> list[Any]:
                scales = [1 + randn(g, d, scale=0.1), 1 + randn(g, d, scale=0.1)] if norms else []
                return [
                    randn(g, 6, (q * (2 if gates else 1) + 2 * kv) * d),
                    torch.tensor([0, 1, 63, 5, 6, 7]),
                    _table(r),
                    q,
                    kv,
                    d,
                    _cache(g, lay, 5, 4, kv, d),
                    _cache(g, lay, 5, 4, kv, d),
                    torch.tensor([7, -1, 0, 19, 4, 5]),
                    lay,
                    *scales,
                ]

            yield KernelCase(
                name=f"{layout}-{name}",
                make=make,
                features=frozenset({"gate"} if "gate" in kwargs else ()),
                shape={"head_dim": dim, "rotary_dim": rotary, "q_heads": q, "kv_heads": kv},
                layout=layout,
                written=frozenset({0, 6, 7}),  # the rows may be rotated where they stand
                keep=frozenset({2}),
                kwargs=kwargs,
            )


def _paged(
    g: torch.Generator,
    layout: str,
    lengths: list[int],
    page_size: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    queries: int,
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """[q, k_cache, v_cache], table and lengths. Cells that no row has written are NaN, table entries past a row's pages are no pages."""
    needed = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(needed) + 3, generator=g).tolist()
    table = torch.full((len(lengths), max([*needed, 1]) + 2), 2**30, dtype=torch.int32)
    caches = [_cache(g, layout, len(order), page_size, kv_heads, dim) for _ in range(2)]
    live = torch.zeros(len(order), page_size, dtype=torch.bool)
    for row, (pages, length) in enumerate(zip(needed, lengths, strict=True)):
        for index in range(pages):
            page = order.pop()
            table[row, index] = page
            live[page, : length - index * page_size] = True
    for cache in caches:
        by_token = cache if layout == "NHD" else cache.transpose(1, 2)
        by_token[~live] = float("nan")
    return [randn(g, queries, q_heads, dim), *caches], table, torch.tensor(lengths, dtype=torch.int32)


_SHAPES = (("grouped", 9, 3, 64), ("multi-head", 4, 4, 64), ("one KV head", 8, 1, 128))
_EXTRAS: tuple[tuple[str, frozenset[str], dict[str, Any]], ...] = (
    ("", frozenset(), {}),
    ("-window", frozenset({"window"}), {"window": 6}),
    ("-softcap", frozenset({"softcap"}), {"softcap": 2.0}),
    ("-sinks", frozenset({"sinks"}), {"sinks": True}),
)


def _variants() -> Iterator[tuple[str, str, int, tuple[str, int, int, int], str, frozenset[str], dict[str, Any]]]:
    for layout in ("NHD", "HND"):
        for shape in _SHAPES:
            for page_size in (4, 16):
                for suffix, features, extra in _EXTRAS if shape[0] == "grouped" else _EXTRAS[:1]:
                    yield (
                        f"{layout}-{shape[0]}-page {page_size}{suffix}",
                        layout,
                        page_size,
                        shape,
                        suffix,
                        features,
                        extra,
                    )


def _kwargs(extra: dict[str, Any], q_heads: int) -> dict[str, Any]:
    return {**extra, "sinks": torch.linspace(-1, 2, q_heads)} if "sinks" in extra else extra


def _traits(shape: tuple[str, int, int, int], page_size: int) -> dict[str, int]:
    return {
        "q_heads": shape[1],
        "kv_heads": shape[2],
        "head_dim": shape[3],
        "v_head_dim": shape[3],
        "page_size": page_size,
    }


def _decode() -> Iterator[KernelCase]:
    lengths = [1, 5, 16, 17, 40, 3]
    for name, layout, page_size, shape, _, features, extra in _variants():
        for width in (1, 3):

            def make(
                g: torch.Generator,
                lay: str = layout,
                ps: int = page_size,
                s: tuple[str, int, int, int] = shape,
                w: int = width,
            ) -> list[Any]:
                own = [max(length, w) for length in lengths]
                tensors, table, lens = _paged(g, lay, own, ps, s[1], s[2], s[3], len(own) * w)
                return [*tensors, table, lens, w, s[3] ** -0.5, lay]

            kwargs = _kwargs(extra, shape[1])
            yield KernelCase(
                name=f"{name}-width {width}",
                make=make,
                features=features,
                shape=_traits(shape, page_size),
                layout=layout,
                kwargs=kwargs,
            )
        if not features:
            yield _shared_prefix(f"{name}-shared", layout, page_size, shape)


def _shared_prefix(name: str, layout: str, page_size: int, shape: tuple[str, int, int, int]) -> KernelCase:
    """Rows 1 to 4 begin with the same two pages, rows 2 and 3 of them share a third: nested intervals."""

    def make(g: torch.Generator) -> list[Any]:
        lengths = [5, 3 * page_size + 1, 4 * page_size, 3 * page_size + 2, 2 * page_size + 3, 2]
        tensors, table, lens = _paged(g, layout, lengths, page_size, shape[1], shape[2], shape[3], len(lengths))
        table[2:5, :2] = table[1, :2].clone()
        table[3, 2] = table[2, 2].clone()
        return [*tensors, table, lens, 1, shape[3] ** -0.5, layout]

    intervals = torch.tensor([[1, 5, 0, 2], [2, 4, 2, 1]], dtype=torch.int32).numpy()
    return KernelCase(
        name=name,
        make=make,
        features=frozenset({"shared_prefix"}),
        shape=_traits(shape, page_size),
        layout=layout,
        kwargs={"prefix_intervals": intervals},
    )


def _extend() -> Iterator[KernelCase]:
    contexts, chunks = [0, 7, 0, 33, 4], [5, 3, 1, 20, 12]
    for name, layout, page_size, shape, _, features, extra in _variants():

        def make(
            g: torch.Generator, lay: str = layout, ps: int = page_size, s: tuple[str, int, int, int] = shape
        ) -> list[Any]:
            lengths = [context + chunk for context, chunk in zip(contexts, chunks, strict=True)]
            tensors, table, lens = _paged(g, lay, lengths, ps, s[1], s[2], s[3], sum(chunks))
            starts = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32)
            return [*tensors, table, lens, starts, s[3] ** -0.5, lay]

        kwargs = _kwargs(extra, shape[1])
        yield KernelCase(
            name=name, make=make, features=features, shape=_traits(shape, page_size), layout=layout, kwargs=kwargs
        )


def _argmax() -> Iterator[KernelCase]:
    def ties(g: torch.Generator) -> list[Any]:
        logits = randn(g, 4, 301)
        logits[0, [7, 200]] = 50.0
        logits[1, 300] = float("inf")
        logits[2, 13] = float("nan")
        logits[3] = 0.0
        return [logits]

    yield KernelCase(name="ties, infinity and NaN", make=ties, shape={"vocab": 301})
    yield KernelCase(name="one row", make=lambda g: [randn(g, 1, 1000)], shape={"vocab": 1000})


def _draw() -> Iterator[KernelCase]:
    def make(g: torch.Generator, vocab: int, scale: float, filters: list[tuple[float, int, float, float]]) -> list[Any]:
        rows = len(filters)
        temperature, top_k, top_p, min_p = zip(*filters, strict=True)
        wide = [torch.tensor(values, dtype=torch.float64) for values in (temperature, top_p, min_p)]
        seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
        positions = torch.randint(0, 5000, (rows,), generator=g)
        index = torch.arange(rows).flip(0) * 2
        k = torch.tensor(top_k, dtype=torch.int64)
        return [randn(g, 2 * rows, vocab, scale=scale), index, wide[0], k, wide[1], wide[2], seeds, positions]

    keep = frozenset({2, 4, 5})
    for name, vocab, scale, filters in (
        ("no filter", 3001, 3.0, [(1.0, 0, 1.0, 0.0), (0.5, -1, 1.0, 0.0), (2.0, 3001, 1.0, 0.0)]),
        ("few tokens", 40, 2.0, [(1.0, 0, 1.0, 0.0), (1.0, 7, 0.75, 0.0)]),
        ("filters that end early", 3001, 6.0, [(1.0, 20, 1.0, 0.0), (1.0, 0, 0.75, 0.0), (1.0, 50, 0.5, 0.125)]),
        ("filters that reach far", 3001, 0.5, [(1.0, 900, 1.0, 0.0), (1.5, 0, 0.75, 0.0), (1.0, 700, 0.75, 0.0)]),
        ("smallest share", 3001, 1.0, [(1.0, 0, 1.0, 0.5), (1.0, 0, 1.0, 0.015625), (1.0, 0, 0.875, 0.03125)]),
    ):
        yield KernelCase(
            name=name,
            make=partial(make, vocab=vocab, scale=scale, filters=filters),
            shape={"vocab": vocab},
            keep=keep,
        )


def _apply_bitmask() -> Iterator[KernelCase]:
    def arguments(rows: int, vocab: int, index: list[int], g: torch.Generator) -> list[Any]:
        bits = torch.randint(-(2**31), 2**31, (len(index), -(-vocab // 32)), generator=g).to(torch.int32)
        bits[0] = -(2**31)  # the sign bit alone: token 31 of every word
        if len(index) > 1:
            bits[1] = -1
        logits = randn(g, rows, vocab)
        logits[0, 31] = float("nan")
        return [logits, bits, torch.tensor(index)]

    for rows, vocab, index in ((1, 32, [0]), (5, 301, [4, 0, 2]), (3, 5000, [0, 1, 2])):
        make = partial(arguments, rows, vocab, index)
        yield KernelCase(
            name=f"{len(index)} of {rows} rows of {vocab}", make=make, shape={"vocab": vocab}, written=frozenset({0})
        )


_MAKERS: dict[str, Callable[[], Iterator[KernelCase]]] = {
    "gemm.linear": _linear,
    "gemm.linear_silu_mul": _gemm,
    "norm.rms_norm": partial(_norm, 1, frozenset()),
    "norm.add_rms_norm": partial(_norm, 2, frozenset({1})),
    "rope.rotate": _rotate,
    "rope.qkv_rope_write": _qkv_rope_write,
    "activation.silu_and_mul": _gated,
    "activation.gelu_tanh_and_mul": _gated,
    "embedding.lookup": _lookup,
    "cache.write": _write,
    "cache.write_latent": _write_latent,
    "attention.decode": _decode,
    "attention.extend": _extend,
    "sampling.argmax": _argmax,
    "sampling.draw": _draw,
    "sampling.apply_bitmask": _apply_bitmask,
    **STATE_CASES,
}

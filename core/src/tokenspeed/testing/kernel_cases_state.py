"""Inputs for ``KernelSuite``: whole pages and states, experts, recurrences, and collectives in a group of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tokenspeed.testing.kernel_case import KernelCase, randn

__all__ = ["STATE_CASES"]


def _copy() -> Iterator[KernelCase]:
    def make(shape: tuple[int, ...], g: torch.Generator) -> list[Any]:
        return [randn(g, *shape), torch.tensor([3, -1, 0, 5, 3]), torch.tensor([4, 1, -1, 2, 6])]

    for shape in ((7, 3, 5, 11), (9, 1037), (7,)):
        yield KernelCase(name="x".join(map(str, shape)), make=partial(make, shape), written=frozenset({0}))


def _zero() -> Iterator[KernelCase]:
    def make(shape: tuple[int, ...], g: torch.Generator) -> list[Any]:
        return [randn(g, *shape), torch.tensor([3, -1, 0, 6])]

    for shape in ((7, 3, 5, 11), (9, 1037), (7,)):
        yield KernelCase(name="x".join(map(str, shape)), make=partial(make, shape), written=frozenset({0}))


def _route() -> Iterator[KernelCase]:
    def make(tokens: int, experts: int, k: int, g: torch.Generator) -> list[Any]:
        logits = randn(g, tokens, experts)
        logits[0, :2] = 9.0  # equals: the lower index
        return [logits, k]

    bias = torch.tensor([0.0, 0.5, -0.5, 1.0, 0.0, 0.25, 0.0, -1.0])
    for name, size, features, kwargs in (
        ("softmax", (5, 8, 2), frozenset[str](), {}),
        ("as they are", (3, 13, 4), frozenset[str](), {"renormalize": False}),
        ("all experts", (2, 3, 3), frozenset[str](), {}),
        ("sigmoid", (4, 8, 3), frozenset({"sigmoid"}), {"scoring": "sigmoid"}),
        ("sigmoid with bias", (4, 8, 3), frozenset({"sigmoid", "bias"}), {"scoring": "sigmoid", "bias": bias}),
        ("best of groups", (6, 12, 3), frozenset({"groups"}), {"renormalize": False, "groups": 4, "kept_groups": 2}),
        (
            "groups by pairs, sigmoid with bias",
            (7, 8, 3),
            frozenset({"sigmoid", "bias", "groups"}),
            {"scoring": "sigmoid", "bias": bias, "groups": 4, "kept_groups": 2, "group_best": 2},
        ),
    ):
        shape = {"experts": size[1], "top_k": size[2]}
        yield KernelCase(name=name, make=partial(make, *size), features=features, shape=shape, kwargs=kwargs)


def _experts() -> Iterator[KernelCase]:
    def make(tokens: int, experts: int, k: int, hidden: int, inter: int, g: torch.Generator) -> list[Any]:
        chosen = torch.rand(tokens, experts, generator=g).argsort(dim=-1)[:, :k]
        chosen[-1, -1] = -1
        weights = torch.rand(tokens, k, generator=g)
        gate_up = randn(g, experts, 2 * inter, hidden, scale=hidden**-0.5)
        return [
            randn(g, tokens, hidden), gate_up, randn(g, experts, hidden, inter, scale=inter**-0.5), weights, chosen,
        ]  # fmt: skip

    for size in ((1, 4, 2, 32, 48), (9, 5, 2, 33, 20), (6, 8, 1, 64, 16)):
        tokens, experts, k, hidden, inter = size
        shape = {"experts": experts, "top_k": k, "hidden": hidden, "intermediate": inter}
        name = f"{tokens} tokens, {k} of {experts}"
        yield KernelCase(name=name, make=partial(make, *size), shape=shape, keep=frozenset({3}))


def _gated_linear() -> Iterator[KernelCase]:
    def make(heads: int, key: int, value: int, decays: int, g: torch.Generator) -> list[Any]:
        lengths = [1, 5, 0, 3]
        tokens = sum(lengths)
        start = torch.tensor([0, *lengths]).cumsum(0).int()
        decay = torch.rand(tokens, heads, decays, generator=g)
        q, k = (randn(g, tokens, heads, key) for _ in range(2))
        states = randn(g, 6, heads, key, value)
        return [q, k, randn(g, tokens, heads, value), decay, states, torch.tensor([2, 5, 0, 3]), start, key**-0.5]

    for heads, key, value, decays in ((2, 8, 12, 8), (3, 16, 5, 1)):
        yield KernelCase(
            name=f"{heads} heads of {key} x {value}, {decays} decays",
            make=partial(make, heads, key, value, decays),
            shape={"heads": heads, "key_dim": key, "value_dim": value},
            written=frozenset({4}),
            keep=frozenset({3, 4}),
        )


def _alone(in_place: bool) -> Iterator[KernelCase]:
    written = frozenset({0}) if in_place else frozenset[int]()
    yield KernelCase(name="a group of one", make=lambda g: [randn(g, 6, 5), None], written=written)


#: Makers by family and mode.
STATE_CASES: dict[str, Callable[[], Iterator[KernelCase]]] = {
    "cache.copy": _copy,
    "cache.zero": _zero,
    "moe.route": _route,
    "moe.experts": _experts,
    "recurrent.copy": _copy,
    "recurrent.zero": _zero,
    "recurrent.gated_linear": _gated_linear,
    "comm.all_reduce": partial(_alone, True),
    "comm.all_gather": partial(_alone, False),
    "comm.reduce_scatter": partial(_alone, False),
}

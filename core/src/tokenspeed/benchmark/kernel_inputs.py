"""Random inputs of one call of each operation, in the sizes of an 8B model unless told otherwise, for timing kernels beside each other.

What a caller asks the registry with (``ASKED``) is only a part of what a call has for sizes: a measurement counts for requests with the same part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.errors import ConfigError

__all__ = ["ASKED", "PAGED", "SIZES", "arguments_for", "asked_shape", "sizes_of"]

_PAGE = 64
_HEADS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
_STATES = {"states": 512, "heads": 32, "key_dim": 128, "value_dim": 128}
#: Sizes that a mode is timed with where ``--shape`` does not give them; the rows (tokens, requests, pages) come from ``--rows``.
SIZES: Mapping[str, Mapping[str, int]] = {
    "gemm.linear": {"n": 4096, "k": 4096},
    "gemm.linear_silu_mul": {"n": 8192, "k": 4096},
    "norm.rms_norm": {"hidden": 4096},
    "norm.add_rms_norm": {"hidden": 4096},
    "rope.rotate": {**_HEADS, "rotary_dim": 128},
    "rope.qkv_rope_write": {**_HEADS, "rotary_dim": 128},
    "activation.silu_and_mul": {"n": 8192},
    "activation.gelu_tanh_and_mul": {"n": 8192},
    "embedding.lookup": {"vocab": 32768, "hidden": 4096},
    "cache.write": {"kv_heads": 8, "head_dim": 128},
    "cache.write_latent": {"rank": 512, "rope_dim": 64},
    "cache.copy": {"kv_heads": 8, "head_dim": 128},
    "cache.zero": {"kv_heads": 8, "head_dim": 128},
    "sampling.argmax": {"vocab_size": 151936},
    "sampling.draw": {"vocab_size": 151936},
    "sampling.apply_bitmask": {"vocab_size": 151936},
    "attention.decode": {**_HEADS, "v_head_dim": 128, "page_size": _PAGE, "context": 1024},
    "attention.extend": {**_HEADS, "v_head_dim": 128, "page_size": _PAGE, "context": 0},
    "moe.route": {"experts": 128, "top_k": 8},
    "moe.experts": {"experts": 32, "top_k": 4, "hidden": 2048, "intermediate": 768},
    "recurrent.copy": _STATES,
    "recurrent.zero": _STATES,
    "recurrent.gated_linear": _STATES,
}
#: The sizes that layers, backends and the KV pool name in their requests; all of them where a mode is not listed.
ASKED: Mapping[str, tuple[str, ...]] = {
    "activation.silu_and_mul": (),
    "activation.gelu_tanh_and_mul": (),
    "attention.decode": ("head_dim", "v_head_dim", "q_heads", "kv_heads", "page_size"),
    "attention.extend": ("head_dim", "v_head_dim", "q_heads", "kv_heads", "page_size"),
    "recurrent.copy": (),
    "recurrent.zero": (),
}
#: Operations on pages: they are asked for with a KV layout, and with ``kv_TYPE`` where pages are of another type than the rest.
PAGED = ("rope.qkv_rope_write", "cache.write", "cache.write_latent", "attention.decode", "attention.extend")


def sizes_of(operation: str, given: Mapping[str, int]) -> dict[str, int]:
    """Every size of a call. Raises ``ConfigError`` for an operation that has no sizes here, or an unknown size."""
    if operation not in SIZES:
        why = (
            "takes several processes to time" if operation.startswith("comm.") else f"can be timed: {', '.join(SIZES)}"
        )
        raise ConfigError(f"kernels bench {operation}: {'it ' if operation.startswith('comm.') else 'these '}{why}")
    unknown = set(given) - set(SIZES[operation])
    if unknown:
        raise ConfigError(f"--shape {sorted(unknown)[0]}: {operation} has the sizes {', '.join(SIZES[operation])}")
    return {**SIZES[operation], **given}


def asked_shape(operation: str, given: Mapping[str, int]) -> dict[str, int]:
    """The part of the sizes that requests for the operation name."""
    sizes = sizes_of(operation, given)
    return {name: sizes[name] for name in ASKED.get(operation, tuple(sizes))}


@dataclass(frozen=True)
class _Call:
    """Rows, sizes and where tensors are of one call."""

    rows: int
    s: Mapping[str, int]
    dtype: torch.dtype
    device: torch.device
    layout: str
    pages_dtype: torch.dtype

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, device=self.device).mul_(0.1).to(self.dtype)

    def pages(self, count: int, heads: int, dim: int, size: int = _PAGE) -> torch.Tensor:
        shape = (count, size, heads, dim) if self.layout == "NHD" else (count, heads, size, dim)
        return self.randn(*shape).to(self.pages_dtype)

    def numbers(self, count: int, below: int | None = None) -> torch.Tensor:
        """``count`` distinct numbers, scattered."""
        below = max(count, below or count)
        step = 7919 if below % 7919 else 104729
        return torch.arange(count, device=self.device) * step % below

    @property
    def slots(self) -> torch.Tensor:
        return self.numbers(self.rows, -(-self.rows // _PAGE) * _PAGE)

    @property
    def page_count(self) -> int:
        return -(-self.rows // _PAGE)


def _rotary(c: _Call) -> list[torch.Tensor]:
    return [c.numbers(c.rows, 4096), torch.randn(4096, c.s["rotary_dim"], dtype=torch.float32, device=c.device)]


def _rotate(c: _Call) -> list[Any]:
    dim = c.s["head_dim"]
    return [c.randn(c.rows, c.s["q_heads"] * dim), c.randn(c.rows, c.s["kv_heads"] * dim), *_rotary(c), dim]


def _qkv_rope_write(c: _Call) -> list[Any]:
    heads, dim = c.s["kv_heads"], c.s["head_dim"]
    qkv = c.randn(c.rows, (c.s["q_heads"] + 2 * heads) * dim)
    pages = [c.pages(c.page_count, heads, dim) for _ in range(2)]
    return [qkv, *_rotary(c), c.s["q_heads"], heads, dim, *pages, c.slots, c.layout]


def _write(c: _Call) -> list[Any]:
    heads, dim = c.s["kv_heads"], c.s["head_dim"]
    new = [c.randn(c.rows, heads, dim) for _ in range(2)]
    return [*new, *(c.pages(c.page_count, heads, dim) for _ in range(2)), c.slots, c.layout]


def _write_latent(c: _Call) -> list[Any]:
    rank, rope = c.s["rank"], c.s["rope_dim"]
    pages = c.pages(c.page_count, 1, rank + rope)
    return [c.randn(c.rows, rank), c.randn(c.rows, rope), pages, c.slots, c.layout]


def _whole_pages(c: _Call) -> torch.Tensor:
    return c.pages(2 * c.rows, c.s["kv_heads"], c.s["head_dim"])


def _states(c: _Call) -> torch.Tensor:
    count = max(c.s["states"], 2 * c.rows)
    shape = (count, c.s["heads"], c.s["key_dim"], c.s["value_dim"])
    return torch.randn(shape, dtype=torch.float32, device=c.device)


def _copied(blocks: torch.Tensor, c: _Call) -> list[Any]:
    numbers = c.numbers(2 * c.rows)
    return [blocks, numbers[: c.rows], numbers[c.rows :]]


def _gated_linear(c: _Call) -> list[Any]:
    heads, key, value = c.s["heads"], c.s["key_dim"], c.s["value_dim"]
    q, k = (c.randn(c.rows, heads, key) for _ in range(2))
    decay = torch.rand(c.rows, heads, key, dtype=torch.float32, device=c.device)
    start = torch.arange(c.rows + 1, dtype=torch.int32, device=c.device)
    return [q, k, c.randn(c.rows, heads, value), decay, _states(c), c.numbers(c.rows), start, key**-0.5]


def _draw(c: _Call) -> list[Any]:
    logits = c.randn(c.rows, c.s["vocab_size"]) * 30
    wide = [torch.full((c.rows,), value, dtype=torch.float64, device=c.device) for value in (1.0, 0.95, 0.0)]
    top_k = torch.full((c.rows,), 50, device=c.device)
    index = torch.arange(c.rows, device=c.device)
    return [logits, index, wide[0], top_k, wide[1], wide[2], index, index]


def _apply_bitmask(c: _Call) -> list[Any]:
    words = -(-c.s["vocab_size"] // 32)
    bits = torch.randint(-(2**31), 2**31, (c.rows, words), device=c.device).to(torch.int32)
    return [c.randn(c.rows, c.s["vocab_size"]), bits, torch.arange(c.rows, device=c.device)]


def _paged(c: _Call, rows: int, length: int) -> list[Any]:
    """Pages, a table and lengths of ``rows`` rows of ``length`` tokens."""
    each = -(-length // c.s["page_size"])
    pages = [c.pages(rows * each, c.s["kv_heads"], c.s[name], c.s["page_size"]) for name in ("head_dim", "v_head_dim")]
    table = c.numbers(rows * each).to(torch.int32).view(rows, each)
    return [*pages, table, torch.full((rows,), length, dtype=torch.int32, device=c.device)]


def _decode(c: _Call) -> list[Any]:
    q = c.randn(c.rows, c.s["q_heads"], c.s["head_dim"])
    return [q, *_paged(c, c.rows, max(1, c.s["context"])), 1, c.s["head_dim"] ** -0.5, c.layout]


def _extend(c: _Call) -> list[Any]:
    """One prompt of ``rows`` tokens after ``context``."""
    q = c.randn(c.rows, c.s["q_heads"], c.s["head_dim"])
    start = torch.tensor([0, c.rows], dtype=torch.int32, device=c.device)
    return [q, *_paged(c, 1, c.rows + c.s["context"]), start, c.s["head_dim"] ** -0.5, c.layout]


def _experts(c: _Call) -> list[Any]:
    count, k, hidden, inter = (c.s[name] for name in ("experts", "top_k", "hidden", "intermediate"))
    weights = torch.full((c.rows, k), 1 / k, dtype=torch.float32, device=c.device)
    chosen = torch.rand(c.rows, count, device=c.device).argsort(dim=-1)[:, :k]
    return [c.randn(c.rows, hidden), c.randn(count, 2 * inter, hidden), c.randn(count, hidden, inter), weights, chosen]


_MAKERS: Mapping[str, Callable[[_Call], list[Any]]] = {
    "gemm.linear": lambda c: [c.randn(c.rows, c.s["k"]), c.randn(c.s["n"], c.s["k"])],
    "gemm.linear_silu_mul": lambda c: [c.randn(c.rows, c.s["k"]), c.randn(c.s["n"], c.s["k"])],
    "norm.rms_norm": lambda c: [c.randn(c.rows, c.s["hidden"]), c.randn(c.s["hidden"]), 1e-6],
    "norm.add_rms_norm": lambda c: [
        *(c.randn(c.rows, c.s["hidden"]) for _ in range(2)), c.randn(c.s["hidden"]), 1e-6,
    ],
    "rope.rotate": _rotate,
    "rope.qkv_rope_write": _qkv_rope_write,
    "activation.silu_and_mul": lambda c: [c.randn(c.rows, c.s["n"])],
    "activation.gelu_tanh_and_mul": lambda c: [c.randn(c.rows, c.s["n"])],
    "embedding.lookup": lambda c: [c.numbers(c.rows, c.s["vocab"]), c.randn(c.s["vocab"], c.s["hidden"])],
    "cache.write": _write,
    "cache.write_latent": _write_latent,
    "cache.copy": lambda c: _copied(_whole_pages(c), c),
    "cache.zero": lambda c: [_whole_pages(c), c.numbers(c.rows)],
    "sampling.argmax": lambda c: [c.randn(c.rows, c.s["vocab_size"]) * 30],
    "sampling.draw": _draw,
    "sampling.apply_bitmask": _apply_bitmask,
    "attention.decode": _decode,
    "attention.extend": _extend,
    "moe.route": lambda c: [c.randn(c.rows, c.s["experts"]), c.s["top_k"]],
    "moe.experts": _experts,
    "recurrent.copy": lambda c: _copied(_states(c), c),
    "recurrent.zero": lambda c: [_states(c), c.numbers(c.rows)],
    "recurrent.gated_linear": _gated_linear,
}  # fmt: skip


def arguments_for(
    operation: str,
    rows: int,
    given: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    layout: str = "NHD",
    pages_dtype: torch.dtype | None = None,
) -> list[Any]:
    """Arguments of one call with random contents; ``pages_dtype`` is that of KV pages. Raises ``ConfigError`` as ``sizes_of`` does."""
    call = _Call(rows, sizes_of(operation, given), dtype, device, layout, pages_dtype or dtype)
    return _MAKERS[operation](call)

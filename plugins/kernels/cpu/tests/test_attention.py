"""Paged attention against a float64 softmax over gathered keys and values."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from tokenspeed_plugin_kernels_cpu.runtime import Runtime


@dataclass
class Case:
    """A random paged cache with rows of given lengths."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    layout: str

    def row(self, cache: torch.Tensor, r: int) -> torch.Tensor:
        """(length, kv_heads, dim) in float64"""
        nhd = cache.transpose(1, 2) if self.layout == "HND" else cache
        pages = self.page_table[r].long().clamp(min=0)
        return nhd[pages].flatten(0, 1)[: int(self.seq_lens[r])].double()


def make_case(
    lengths: list[int],
    kv_heads: int,
    dim: int,
    page_size: int,
    layout: str,
    dtype: torch.dtype = torch.float32,
    value_dim: int | None = None,
) -> Case:
    """Pages that no row owns hold NaN, and so does every unwritten slot: a kernel that reads one shows it."""
    columns = max(1, max(-(-length // page_size) for length in lengths))
    pages = sum(-(-length // page_size) for length in lengths) + 3
    order = torch.randperm(pages, dtype=torch.int32)
    table = torch.full((len(lengths), columns + 2), -1, dtype=torch.int32)
    caches = []
    for size in (dim, value_dim or dim):
        caches.append(torch.full((pages, page_size, kv_heads, size), float("nan")))
    used = 0
    for r, length in enumerate(lengths):
        for index in range(-(-length // page_size)):
            table[r, index] = order[used]
            count = min(page_size, length - index * page_size)
            for cache in caches:
                cache[int(order[used]), :count] = torch.randn(count, kv_heads, cache.shape[3])
            used += 1
    k_cache, v_cache = ((c.transpose(1, 2) if layout == "HND" else c).contiguous().to(dtype) for c in caches)
    return Case(k_cache, v_cache, table[:, :columns], torch.tensor(lengths, dtype=torch.int32), layout)


def reference(
    case: Case,
    q: torch.Tensor,
    r: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q (n, Hq, D): the last n tokens of row r."""
    k, v = case.row(case.k_cache, r), case.row(case.v_cache, r)
    n, q_heads, _ = q.shape
    group = q_heads // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,thd->hnt", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    length = k.shape[0]
    query, key = torch.arange(length - n, length)[:, None], torch.arange(length)[None]
    hidden = (key > query) | ((key <= query - window) if window else torch.zeros(1, dtype=torch.bool))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(q_heads, n, 1)], dim=2)
    weights = scores.softmax(dim=2)[:, :, :length]
    return torch.einsum("hnt,thd->nhd", weights, v)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    narrow = out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), expected, atol=2e-2 if narrow else 3e-6, rtol=1e-2 if narrow else 1e-5)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 20), (7, 7, 130)])
@pytest.mark.parametrize("width", [1, 3])
def test_decode(
    runtime: Runtime, q_heads: int, kv_heads: int, dim: int, page_size: int, layout: str, width: int
) -> None:
    lengths = [width, 63, 64, 65, 128, 300]
    case = make_case(lengths, kv_heads, dim, page_size, layout)
    q = torch.randn(len(lengths) * width, q_heads, dim)
    out = runtime.decode(q, case.k_cache, case.v_cache, case.page_table, case.seq_lens, width, dim**-0.5, layout)
    for r in range(len(lengths)):
        close(out[r * width : (r + 1) * width], reference(case, q[r * width : (r + 1) * width], r, dim**-0.5))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 20), (7, 7, 130)])
def test_extend(runtime: Runtime, q_heads: int, kv_heads: int, dim: int, page_size: int, layout: str) -> None:
    lengths, chunks = [1, 70, 200, 333], [1, 70, 5, 64]
    case = make_case(lengths, kv_heads, dim, page_size, layout)
    start = torch.tensor([0, *torch.tensor(chunks).cumsum(0)], dtype=torch.int32)
    q = torch.randn(sum(chunks), q_heads, dim)
    out = runtime.extend(q, case.k_cache, case.v_cache, case.page_table, case.seq_lens, start, dim**-0.5, layout)
    for r in range(len(lengths)):
        close(out[start[r] : start[r + 1]], reference(case, q[start[r] : start[r + 1]], r, dim**-0.5))


@pytest.mark.parametrize("window", [0, 1, 5, 64, 100])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_window_softcap_and_sinks(runtime: Runtime, window: int, softcap: float, with_sinks: bool) -> None:
    lengths, width, chunks = [7, 129, 260], 2, [7, 40, 130]
    case = make_case(lengths, 2, 32, 16, "HND")
    sinks = torch.randn(6) if with_sinks else None
    q = torch.randn(len(lengths) * width, 6, 32) * 3
    out = runtime.decode(
        q, case.k_cache, case.v_cache, case.page_table, case.seq_lens, width, 0.2, "HND", window, softcap, sinks
    )
    for r in range(3):
        close(out[2 * r : 2 * r + 2], reference(case, q[2 * r : 2 * r + 2], r, 0.2, window, softcap, sinks))
    start = torch.tensor([0, 7, 47, 177], dtype=torch.int32)
    q = torch.randn(sum(chunks), 6, 32) * 3
    out = runtime.extend(
        q, case.k_cache, case.v_cache, case.page_table, case.seq_lens, start, 0.2, "HND", window, softcap, sinks
    )
    for r in range(3):
        close(out[start[r] : start[r + 1]], reference(case, q[start[r] : start[r + 1]], r, 0.2, window, softcap, sinks))


@pytest.mark.parametrize(
    ("q_dtype", "cache_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_bfloat16_and_mixed_caches(runtime: Runtime, q_dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    case = make_case([100, 17], 3, 64, 16, "HND", cache_dtype)
    q = torch.randn(2, 9, 64).to(q_dtype)
    out = runtime.decode(q, case.k_cache, case.v_cache, case.page_table, case.seq_lens, 1, 0.125, "HND")
    assert out.dtype is q_dtype
    for r in range(2):
        close(out[r : r + 1], reference(case, q[r : r + 1], r, 0.125))
    start = torch.tensor([0, 30, 47], dtype=torch.int32)
    q = torch.randn(47, 9, 64).to(q_dtype)
    out = runtime.extend(q, case.k_cache, case.v_cache, case.page_table, case.seq_lens, start, 0.125, "HND")
    close(out[:30], reference(case, q[:30], 0, 0.125))
    close(out[30:], reference(case, q[30:], 1, 0.125))


def test_value_heads_of_another_size(runtime: Runtime) -> None:
    case = make_case([90], 2, 48, 16, "NHD", value_dim=33)
    q = torch.randn(1, 4, 48)
    out = runtime.decode(q, case.k_cache, case.v_cache, case.page_table, case.seq_lens, 1, 0.1, "NHD")
    assert out.shape == (1, 4, 33)
    close(out, reference(case, q, 0, 0.1))


def shared_case(page_size: int, trunk: int, limbs: list[int], tails: list[int], fan: int) -> tuple[Case, torch.Tensor]:
    """Rows that share `trunk` pages; groups of `fan` rows share further `limbs` pages; each has a tail of its own."""
    lengths = [
        (trunk + limb) * page_size + tail
        for limb, tail in zip([x for x in limbs for _ in range(fan)], tails, strict=True)
    ]
    case = make_case(lengths, 3, 64, page_size, "HND")
    rows = len(lengths)
    intervals = [[0, rows, 0, trunk]]
    case.page_table[:, :trunk] = case.page_table[0, :trunk]
    for i, limb in enumerate(limbs):
        case.page_table[i * fan : (i + 1) * fan, trunk : trunk + limb] = case.page_table[i * fan, trunk : trunk + limb]
        if limb:
            intervals.append([i * fan, (i + 1) * fan, trunk, limb])
    return case, torch.tensor(intervals, dtype=torch.int32)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("width", [1, 2])
def test_shared_prefixes_change_no_bit(runtime: Runtime, page_size: int, width: int) -> None:
    """Nested intervals are only a saving: the result equals the one without them, and the reference."""
    scale = 64 // page_size
    case, intervals = shared_case(page_size, 5 * scale, [3 * scale, 0, 2 * scale + 1], [3, 9, 200, 2, 5, 17], 2)
    q = torch.randn(6 * width, 9, 64)
    arguments = (case.k_cache, case.v_cache, case.page_table, case.seq_lens, width, 0.125, "HND")
    plain = runtime.decode(q, *arguments)
    assert torch.equal(runtime.decode(q, *arguments, prefix_intervals=intervals), plain)
    assert torch.equal(runtime.decode(q, *arguments, prefix_intervals=intervals.numpy()), plain)
    for r in range(6):
        close(plain[r * width : (r + 1) * width], reference(case, q[r * width : (r + 1) * width], r, 0.125))


def test_a_shared_prefix_is_read_from_one_row(runtime: Runtime) -> None:
    """The saving is real: inside an interval only the first row's page ids are looked at."""
    case, intervals = shared_case(16, 16, [0], [5, 7], 2)
    q = torch.randn(2, 9, 64)
    expected = runtime.decode(q, case.k_cache, case.v_cache, case.page_table, case.seq_lens, 1, 0.125, "HND")
    case.page_table[1, :16] = -1
    arguments = (case.k_cache, case.v_cache, case.page_table, case.seq_lens, 1, 0.125, "HND")
    assert torch.equal(runtime.decode(q, *arguments, prefix_intervals=intervals), expected)
    with pytest.raises(IndexError, match="page_table names a page outside"):
        runtime.decode(q, *arguments)


def test_a_row_does_not_depend_on_the_batch(runtime: Runtime) -> None:
    """Batch invariance of decode and extend, whatever the other rows, the chunk's cut and the number of threads."""
    lengths = [40, 129, 500, 777]
    case = make_case(lengths, 3, 64, 16, "HND")
    q = torch.randn(4, 9, 64)
    other = Runtime(3, runtime.isa)
    whole = runtime.decode(q, case.k_cache, case.v_cache, case.page_table, case.seq_lens, 1, 0.125, "HND")
    for r in range(4):
        alone = other.decode(
            q[r : r + 1],
            case.k_cache,
            case.v_cache,
            case.page_table[r : r + 1],
            case.seq_lens[r : r + 1],
            1,
            0.125,
            "HND",
        )
        assert torch.equal(alone[0], whole[r])
    q = torch.randn(200, 9, 64)
    table, start = case.page_table[3:], torch.tensor([0, 200], dtype=torch.int32)
    whole = runtime.extend(q, case.k_cache, case.v_cache, table, case.seq_lens[3:], start, 0.125, "HND")
    for first, last in [(0, 1), (1, 17), (17, 120), (120, 200)]:
        lens, start = torch.tensor([577 + last], dtype=torch.int32), torch.tensor([0, last - first], dtype=torch.int32)
        part = other.extend(q[first:last], case.k_cache, case.v_cache, table, lens, start, 0.125, "HND")
        assert torch.equal(part, whole[first:last])


def test_random_shapes(runtime: Runtime) -> None:
    """Sixty random calls of both modes: heads, sizes, pages, widths, windows, sinks."""
    rng = random.Random(5)
    for _ in range(30):
        kv_heads, group, dim = rng.randint(1, 4), rng.randint(1, 5), rng.choice([8, 16, 24, 64, 65])
        page_size, layout, width = rng.choice([1, 3, 16, 64]), rng.choice(["HND", "NHD"]), rng.randint(1, 4)
        lengths = [rng.randint(width, 400) for _ in range(rng.randint(1, 4))]
        case = make_case(lengths, kv_heads, dim, page_size, layout)
        window = rng.choice([0, 0, rng.randint(1, 300)])
        sinks = rng.choice([None, torch.randn(kv_heads * group)])
        q = torch.randn(len(lengths) * width, kv_heads * group, dim)
        arguments = (case.k_cache, case.v_cache, case.page_table, case.seq_lens)
        out = runtime.decode(q, *arguments, width, 0.3, layout, window, 0.0, sinks)
        for r in range(len(lengths)):
            rows = slice(r * width, (r + 1) * width)
            close(out[rows], reference(case, q[rows], r, 0.3, window, 0.0, sinks))
        chunks = [rng.randint(1, length) for length in lengths]
        start = torch.tensor([0, *torch.tensor(chunks).cumsum(0)], dtype=torch.int32)
        q = torch.randn(sum(chunks), kv_heads * group, dim)
        out = runtime.extend(q, *arguments, start, 0.3, layout, window, 0.0, sinks)
        for r in range(len(lengths)):
            rows = slice(int(start[r]), int(start[r + 1]))
            close(out[rows], reference(case, q[rows], r, 0.3, window, 0.0, sinks))


def test_padding_rows_give_zero(runtime: Runtime) -> None:
    case = make_case([0, 5], 1, 16, 16, "HND")
    out = runtime.decode(
        torch.randn(2, 2, 16), case.k_cache, case.v_cache, case.page_table, case.seq_lens, 1, 1.0, "HND"
    )
    assert torch.equal(out[0], torch.zeros(2, 16))


def test_misfits_are_named(runtime: Runtime) -> None:
    case = make_case([20, 30], 2, 16, 16, "HND")
    q = torch.randn(2, 4, 16)
    rest = (case.k_cache, case.v_cache, case.page_table, case.seq_lens)
    with pytest.raises(ValueError, match="2 query tokens for each row"):
        runtime.decode(q, *rest, 2, 1.0, "HND")
    with pytest.raises(ValueError, match="multiple of the cache's heads"):
        runtime.decode(torch.randn(2, 3, 16), *rest, 1, 1.0, "HND")
    with pytest.raises(ValueError, match="must not be negative"):
        runtime.decode(q, *rest, 1, 1.0, "HND", -1)
    with pytest.raises(ValueError, match="sinks must be"):
        runtime.decode(q, *rest, 1, 1.0, "HND", sinks=torch.randn(3))
    with pytest.raises(ValueError, match="prefix_intervals must be"):
        runtime.decode(q, *rest, 1, 1.0, "HND", prefix_intervals=torch.zeros(1, 3, dtype=torch.int32))
    with pytest.raises(IndexError, match="outside the 2 rows"):
        runtime.decode(q, *rest, 1, 1.0, "HND", prefix_intervals=torch.tensor([[0, 3, 0, 1]], dtype=torch.int32))
    with pytest.raises(IndexError, match=r"seq_lens\[1\] is 33"):
        runtime.decode(q, *rest[:3], torch.tensor([20, 33], dtype=torch.int32), 1, 1.0, "HND")
    with pytest.raises(IndexError, match="row 0 has 21 query tokens"):
        runtime.extend(torch.randn(22, 4, 16), *rest, torch.tensor([0, 21, 22], dtype=torch.int32), 1.0, "HND")
    with pytest.raises(IndexError, match="query_start must begin at 0"):
        runtime.extend(q, *rest, torch.tensor([0, 1, 3], dtype=torch.int32), 1.0, "HND")

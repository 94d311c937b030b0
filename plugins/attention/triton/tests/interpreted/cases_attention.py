"""Decode and extend against a plain softmax, under the Triton interpreter."""

import numpy as np
import pytest
import torch
from tokenspeed_plugin_attention_triton.kernels import DecodeWork, run_extend
from tokenspeed_plugin_attention_triton.plan import plan_decode

PAGES = 400


def one_query(q, keys, values, limit, *, group, window, softcap, sinks):
    """q (H, D) over the first ``limit`` tokens of keys and values (n, Hk, D)."""
    out = torch.zeros(q.shape[0], values.shape[-1])
    for head in range(q.shape[0]):
        scores = keys[:limit, head // group] @ q[head] * q.shape[1] ** -0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if window:
            scores[: max(0, limit - window)] = -torch.inf
        sink = torch.full((1,), -torch.inf) if sinks is None else sinks[head : head + 1]
        out[head] = torch.softmax(torch.cat([scores, sink]), 0)[:-1] @ values[:limit, head // group]
    return out


class Case:
    """Random rows over shuffled pages, with nested shared prefixes."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.page = int(rng.choice([16, 64]))
        self.kv_heads = int(rng.choice([1, 2]))
        self.group = int(rng.choice([1, 3, 4]))
        self.dim = int(rng.choice([32, 48]))
        self.width = int(rng.choice([1, 1, 2, 3]))
        self.layout = str(rng.choice(["HND", "NHD"]))
        self.window = int(rng.choice([0, 0, 70]))
        self.softcap = float(rng.choice([0.0, 0.0, 5.0]))
        self.sinks = torch.randn(self.kv_heads * self.group) if rng.random() < 0.4 else None
        self.rows = int(rng.choice([1, 3, 5]))
        shared = int(rng.choice([0, 256, 512])) // self.page
        inner = int(rng.choice([0, 256])) // self.page if shared and self.rows >= 4 else 0
        inner_rows = self.rows // 2 if inner else 0
        pages = rng.permutation(PAGES).tolist()
        common, below = [pages.pop() for _ in range(shared)], [pages.pop() for _ in range(inner)]
        self.own = rng.integers(self.width, 150, self.rows)
        self.table = np.zeros((self.rows, 80), dtype=np.int32)
        lens = []
        for row in range(self.rows):
            mine = common + (below if row < inner_rows else [])
            lens.append(len(mine) * self.page + int(self.own[row]))
            mine = mine + [pages.pop() for _ in range(-(-lens[-1] // self.page) - len(mine))]
            self.table[row, : len(mine)] = mine
        self.lens = np.array(lens, dtype=np.int32)
        intervals = ([(0, self.rows, 0, shared)] if shared and self.rows > 1 else []) + (
            [(0, inner_rows, shared, inner)] if inner_rows > 1 else []
        )
        self.intervals = np.array(intervals, dtype=np.int32).reshape(-1, 4)
        shape = (
            (PAGES, self.kv_heads, self.page, self.dim)
            if self.layout == "HND"
            else (PAGES, self.page, self.kv_heads, self.dim)
        )
        self.k, self.v = torch.randn(shape), torch.randn(shape)
        self.programs = int(rng.choice([2, 5, 8]))

    def to_fp8(self):
        """Pages of fp8; what rows hold from now on is what those pages hold."""
        self.k, self.v = self.k.to(torch.float8_e4m3fn), self.v.to(torch.float8_e4m3fn)

    def options(self):
        return {"window": self.window, "softcap": self.softcap, "sinks": self.sinks}

    def flat(self, cache, row):
        picked = cache.float()[self.table[row]]
        return (picked.transpose(1, 2) if self.layout == "HND" else picked).reshape(-1, self.kv_heads, self.dim)

    def expect(self, q, row, limit):
        return one_query(q, self.flat(self.k, row), self.flat(self.v, row), limit, group=self.group, **self.options())

    def decode(self, q, intervals):
        work = DecodeWork(
            max_rows=8,
            max_width=3,
            q_heads=self.kv_heads * self.group,
            kv_heads=self.kv_heads,
            v_dim=self.dim,
            page_size=self.page,
            device=torch.device("cpu"),
            programs=self.programs,
        )
        work.prepare(self.lens, intervals, self.width)
        return work.run(
            q,
            self.k,
            self.v,
            torch.from_numpy(self.table),
            torch.from_numpy(self.lens),
            width=self.width,
            scale=self.dim**-0.5,
            layout=self.layout,
            **self.options(),
        )


@pytest.mark.parametrize(("seed", "fp8"), [*((s, False) for s in range(16)), *((s, True) for s in range(24, 32))])
def test_decode_equals_softmax_over_each_row(seed, fp8):
    case = Case(seed)
    if fp8:
        case.to_fp8()
    q = torch.randn(case.rows * case.width, case.kv_heads * case.group, case.dim)
    out = case.decode(q, case.intervals)
    for row in range(case.rows):
        for w in range(case.width):
            expected = case.expect(q[row * case.width + w], row, int(case.lens[row]) - case.width + w + 1)
            torch.testing.assert_close(out[row * case.width + w], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("seed", range(16, 24))
def test_shared_prefix_decode_equals_flat_decode(seed):
    case = Case(seed)
    q = torch.randn(case.rows * case.width, case.kv_heads * case.group, case.dim)
    none = np.zeros((0, 4), dtype=np.int32)
    torch.testing.assert_close(case.decode(q, case.intervals), case.decode(q, none), atol=2e-5, rtol=2e-5)


def extend(case, lengths):
    """(queries, where each row's begin, answers) for so many new tokens a row."""
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    q = torch.randn(int(start[-1]), case.kv_heads * case.group, case.dim)
    blocks = np.array([(r, f) for r in range(case.rows) for f in range(0, int(lengths[r]), 16)], dtype=np.int32)
    out = run_extend(
        q,
        case.k,
        case.v,
        torch.from_numpy(case.table),
        torch.from_numpy(case.lens),
        torch.from_numpy(start),
        torch.from_numpy(blocks),
        kv_heads=case.kv_heads,
        page_size=case.page,
        scale=case.dim**-0.5,
        layout=case.layout,
        block_rows=16,
        **case.options(),
    )
    return q, start, out


def spoil(case, queries):
    """Fill the pages behind the window of every row that has them with what is not a number; ``queries`` are the rows' new tokens."""
    first = np.maximum(0, case.lens - queries - case.window + 1) // case.page
    behind = {page for row in range(case.rows) for page in case.table[row, : first[row]].tolist()}
    for row in range(case.rows):
        behind -= set(case.table[row, first[row] : -(-case.lens[row] // case.page)].tolist())
    case.k[sorted(behind)] = case.v[sorted(behind)] = torch.nan
    return len(behind)


@pytest.mark.parametrize("window", [1, 70])
@pytest.mark.parametrize("seed", range(40, 43))
def test_pages_behind_a_window_are_not_read(seed, window):
    """They may be another request's by now, and 0 x NaN is NaN: a mask alone does not do."""
    case = Case(seed)
    case.window = window
    spoiled = spoil(case, case.width)
    assert spoiled or int(case.lens.max()) < window + case.page + case.width
    q = torch.randn(case.rows * case.width, case.kv_heads * case.group, case.dim)
    none = np.zeros((0, 4), dtype=np.int32)  # what rows share in full groups says nothing of windows
    assert case.decode(q, none).isfinite().all()
    lengths = np.minimum(case.own, np.random.default_rng(seed).integers(1, 40, case.rows))
    case = Case(seed)
    case.window = window
    spoil(case, lengths)
    assert extend(case, lengths)[2].isfinite().all()


@pytest.mark.parametrize(("seed", "fp8"), [*((s, False) for s in range(8)), *((s, True) for s in range(8, 14))])
def test_extend_equals_softmax_over_each_query(seed, fp8):
    case = Case(seed)
    if fp8:
        case.to_fp8()
    rng = np.random.default_rng(seed)
    lengths = np.minimum(case.own, rng.integers(1, 40, case.rows))
    q, start, out = extend(case, lengths)
    for row in range(case.rows):
        for t in {0, int(lengths[row]) // 2, int(lengths[row]) - 1}:
            expected = case.expect(q[start[row] + t], row, int(case.lens[row] - lengths[row]) + t + 1)
            torch.testing.assert_close(out[start[row] + t], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("seed", range(40))
def test_plan_covers_every_token_of_every_row_once_and_numbers_parts_in_order(seed):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 40))
    page, width, group = 16, int(rng.integers(1, 4)), int(rng.choice([1, 4, 7]))
    pages = int(rng.integers(0, 40))
    cut = int(rng.integers(0, rows + 1))
    intervals = [(0, rows, 0, pages)] if pages and rows > 1 else []
    deeper = int(rng.integers(1, 30)) if intervals and cut > 1 else 0
    if deeper:
        intervals.append((0, cut, pages, deeper))
    base = (
        np.where(np.arange(rows) < cut, pages + deeper, pages) * page if intervals else np.zeros(rows, dtype=np.int64)
    )
    lens = (base + rng.integers(width, 3000, rows)).astype(np.int32)
    plan = plan_decode(
        lens,
        np.array(intervals, dtype=np.int32).reshape(-1, 4),
        width=width,
        group=group,
        kv_heads=8,
        page_size=page,
        programs=264,
        block=64,
        tile=64,
        max_entries=4000,
    )
    assert plan.entries <= 4000
    covered = [np.zeros(n, dtype=np.int64) for n in lens]
    entries = {}
    for item in (*plan.own.tolist(), *plan.shared.tolist()):
        _, first, n, begin, end, entry, *_ = item
        assert n * width * group <= max(64, width * group)
        for row in range(first, first + n):
            covered[row][begin:end] += 1
            entries[(row, begin)] = entry + (row - first) * width
    assert all((c == 1).all() for c in covered)
    for row in range(rows):
        in_order = [entries[key] for key in sorted(entries) if key[0] == row]
        assert plan.parts[row] == len(in_order)
        assert plan.part_table[row, : len(in_order)].tolist() == in_order
    used = sorted(e + w for e in entries.values() for w in range(width))
    assert used == list(range(plan.entries))

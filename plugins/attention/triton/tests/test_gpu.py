"""On a device: ``pytest -m gpu plugins/attention/triton``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenspeed_plugin_attention_triton.kernels import DecodeWork
from tokenspeed_plugin_attention_triton.plugin import tokenspeed_attention_backends

from tokenspeed.testing.attention import AttentionBackendSuite

pytestmark = pytest.mark.gpu
_SPEC = tokenspeed_attention_backends()[0]
_SUPPORTS = replace(_SPEC.supports, dtypes=("bf16",), head_dims=(128,))
PAGE, HEADS, KV_HEADS, DIM = 64, 16, 4, 128


class TestTritonBackend(AttentionBackendSuite):
    spec = replace(_SPEC, supports=replace(_SUPPORTS, kv_dtypes=("bf16", "fp8"), layouts=("HND",), page_sizes=(64, 16)))
    device, platform, capability = "cuda", "cuda", (9, 0)


class TestTokensBeforeHeads(AttentionBackendSuite):
    """The other layout, once."""

    spec = replace(_SPEC, supports=replace(_SUPPORTS, kv_dtypes=("bf16",), layouts=("NHD",), page_sizes=(64,)))
    device, platform, capability = "cuda", "cuda", (9, 0)
    heads = ((6, 2),)


def grouped(rng, rows, pages):
    """(intervals, page table, tokens of each row) of ``rows`` in tree order: groups nest, some have one row, some rows are in none."""
    table, lengths = np.zeros((rows, 64), dtype=np.int32), np.zeros(rows, dtype=np.int32)
    intervals = []

    def fill(first, last, depth):
        count = int(rng.choice([0, 0, 1, 4, 9])) if depth < 30 else 0
        if count:
            intervals.append((first, last, depth, count))
            table[first:last, depth : depth + count] = [pages.pop() for _ in range(count)]
            depth += count
        if last - first == 1 or (depth and rng.random() < 0.3):
            for row in range(first, last):
                own = int(rng.integers(1, 500))
                lengths[row] = depth * PAGE + own
                for at in range(depth, depth + -(-own // PAGE)):
                    table[row, at] = pages.pop()
            return
        cut = int(rng.integers(first + 1, last))
        fill(first, cut, depth)
        fill(cut, last, depth)

    fill(0, rows, 0)
    return np.array(intervals, dtype=np.int32).reshape(-1, 4), table, lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_prefix_decode_equals_flat_decode_on_random_groupings(dtype):
    """Nested groups, groups of one row, rows without a group; one token a row and several."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    k = torch.randn(2048, KV_HEADS, PAGE, DIM, dtype=dtype, device=device)
    v = torch.randn_like(k)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    work = DecodeWork(
        max_rows=64,
        max_width=3,
        q_heads=HEADS,
        kv_heads=KV_HEADS,
        v_dim=DIM,
        page_size=PAGE,
        device=device,
        programs=2 * processors,
    )
    shared, nested, alone = 0, 0, 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        rows, width = int(rng.choice([1, 2, 3, 8, 21, 64])), int(rng.choice([1, 1, 1, 3]))
        intervals, table, lengths = grouped(rng, rows, rng.permutation(2048).tolist())
        lengths = np.maximum(lengths, width).astype(np.int32)
        q = torch.randn(rows * width, HEADS, DIM, dtype=dtype, device=device)
        tables, seq_lens = torch.from_numpy(table).to(device), torch.from_numpy(lengths).to(device)

        def decode(groups, q=q, tables=tables, seq_lens=seq_lens, lengths=lengths, width=width):
            work.prepare(lengths, groups, width)
            return work.run(q, k, v, tables, seq_lens, width=width, scale=DIM**-0.5, layout="HND")

        flat = decode(np.zeros((0, 4), dtype=np.int32))
        assert not work.has_shared
        together = decode(intervals)
        shared += work.has_shared
        nested += len(intervals) > 1
        alone += any(last - first == 1 for first, last, *_ in intervals.tolist())
        tolerance = 1e-4 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(together, flat, rtol=tolerance, atol=tolerance)
    assert min(shared, nested, alone) > 10, "the groupings are of every kind"

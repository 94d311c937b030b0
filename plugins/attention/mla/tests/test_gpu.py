"""The conformance suites on a device: ``pytest -m gpu plugins/attention/mla``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenspeed_plugin_attention_mla.hopper import HOPPER_TILES
from tokenspeed_plugin_attention_mla.plugin import tokenspeed_attention_backends, tokenspeed_kernels
from tokenspeed_plugin_attention_mla.tiling import TILES, Tiling
from tokenspeed_plugin_attention_mla.work import LatentWork, processors_of

from tokenspeed.builtin.kernels import attention as reference
from tokenspeed.testing.attention import AttentionBackendSuite
from tokenspeed.testing.kernel import KernelSuite

pytestmark = pytest.mark.gpu
_SPEC = tokenspeed_attention_backends()[0]


class TestMlaBackend(AttentionBackendSuite):
    spec = replace(_SPEC, supports=replace(_SPEC.supports, dtypes=("bf16", "fp16")))
    device, platform, capability = "cuda", "cuda", (9, 0)
    latents = ((5, 32, 16), (16, 512, 64), (40, 512, 64), (128, 512, 64))


class TestWriteLatent(KernelSuite):
    spec = tokenspeed_kernels()[0]
    device, platform, capability = "cuda", "cuda", (9, 0)


@pytest.mark.parametrize("tiles", [TILES, HOPPER_TILES], ids=["portable", "hopper"])
@pytest.mark.parametrize("heads", [16, 24, 128])
def test_a_captured_decode_serves_other_lengths_and_pages(heads: int, tiles: tuple[Tiling, ...]) -> None:
    """One graph with the merge is replayed for rows of any length, without a wait between plan and launch; what lies behind a row's end may be NaN."""
    torch.manual_seed(0)
    device, rank, rope, page, rows = torch.device("cuda"), 512, 64, 64, 5
    work = LatentWork(
        heads=heads,
        rank=rank,
        rope=rope,
        page_size=page,
        max_rows=rows,
        max_queries=64 * heads,
        processors=processors_of(device),
        device=device,
        tiles=tiles,
    )
    clean = torch.randn(rows * 40, page, 1, rank + rope, dtype=torch.bfloat16, device=device)
    latents = clean.clone()
    q = torch.randn(rows, heads, rank + rope, dtype=torch.bfloat16, device=device)
    table = torch.zeros(rows, 40, dtype=torch.int32, device=device)
    lengths = torch.zeros(rows, dtype=torch.int32, device=device)
    start = torch.arange(rows + 1, dtype=torch.int32, device=device)

    def fill(values: list[int]) -> None:
        host = np.array(values, dtype=np.int32)
        lengths.copy_(torch.from_numpy(host))
        table.copy_(torch.randperm(rows * 40).reshape(rows, 40).to(torch.int32))
        latents.copy_(clean)
        for row, length in enumerate(values):
            if length % page:
                latents[table[row, length // page].long(), length % page :] = float("nan")
        work.prepare(host, 1)
        work.has_split = True

    def run() -> torch.Tensor:
        return work.decode(q, latents, table, lengths, start, width=1, scale=0.05)

    fill([1, 64, 65, 700, 2500])
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for values in ([1, 64, 65, 700, 2500], [1] * rows, [2560] * rows, [3, 2000, 1, 1, 130]):
        fill(values)
        graph.replay()
        expected = reference.decode(q, clean, clean[..., :rank], table, lengths, 1, 0.05, "NHD")
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)

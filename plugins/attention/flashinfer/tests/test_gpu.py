"""On a device with FlashInfer: ``pytest -m gpu plugins/attention/flashinfer``. In bf16, as every further type is another compilation of FlashInfer's."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenspeed_plugin_attention_flashinfer.latent import FlashInferLatentBackend
from tokenspeed_plugin_attention_flashinfer.plugin import tokenspeed_attention_backends

from tokenspeed.builtin.attention.torch_backend import TorchAttention
from tokenspeed.interfaces.attention import AttentionLayer
from tokenspeed.testing.attention import AttentionBackendSuite
from tokenspeed.testing.harness import attention_context
from tokenspeed.testing.paged import PagedCache, Session
from tokenspeed.types import CacheGroup, KVLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"),
]
HEADS, LATENTS = tokenspeed_attention_backends()
BF16 = {"dtypes": ("bf16",), "kv_dtypes": ("bf16",)}


class TestHeads(AttentionBackendSuite):
    spec = replace(HEADS, supports=replace(HEADS.supports, **BF16, page_sizes=(64, 16), head_dims=(128,)))
    device, platform, capability = "cuda", "cuda", (9, 0)


class TestHeadsInTheirPages(AttentionBackendSuite):
    """Prompts are read where their pages lie, as those with much context are."""

    spec = replace(HEADS, supports=replace(HEADS.supports, **BF16, page_sizes=(64,), head_dims=(128,)))
    device, platform, capability = "cuda", "cuda", (9, 0)
    heads = ((6, 2),)

    @pytest.fixture(autouse=True)
    def no_gather(self, monkeypatch):
        monkeypatch.setattr("tokenspeed_plugin_attention_flashinfer.backend._GATHER_LIMIT", 0)


class TestLatents(AttentionBackendSuite):
    spec = replace(LATENTS, supports=replace(LATENTS.supports, **BF16, page_sizes=(64, 16)))
    device, platform, capability = "cuda", "cuda", (9, 0)
    latents = ((16, 512, 64), (128, 512, 64))


@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_decode_of_latents_serves_other_lengths_and_pages(heads: int) -> None:
    """One graph is replayed for rows of any length; what changes between replays is sent before each."""
    device, rows = torch.device("cuda"), 5
    group = CacheGroup(kind="mla", layers=(0,), kv_heads=1, head_dim=576, v_head_dim=512)
    context = attention_context(group, heads, page_size=64, layout=KVLayout.HND, dtype=torch.bfloat16, device=device)
    backend, reference = FlashInferLatentBackend(context), TorchAttention(context)
    layer = AttentionLayer(index=0, scale=0.05)
    backend.bind_layers([layer])
    cache = PagedCache([group], page_size=64, num_pages=256, layout=KVLayout.HND, dtype=torch.bfloat16, device=device)
    cache.layer(0).k.normal_()
    table = torch.zeros(rows, 64, dtype=torch.int32, device=device)
    q = torch.randn(rows, heads, 576, dtype=torch.bfloat16, device=device)

    def step(lengths):
        """A decode of rows that have so many tokens with the new one; its tables are the graph's."""
        sessions = [Session(length=n - 1) for n in lengths]
        for session in sessions:
            session.pages = [int(page) for page in np.random.default_rng(session.length).permutation(256)[:40]]
        batch = cache.batch(decode=[(session, [0]) for session in sessions])
        own = batch.page_tables[0].clamp(0, 255)
        table[:, : own.shape[1]].copy_(own)
        return batch

    def run(batch):
        batch.page_tables = [table.clone()]  # made anew in the graph, as an engine's graph does
        return backend.forward_decode(q, cache.layer(0), layer, batch)

    first = step([1, 64, 65, 700, 2500])
    backend.init_capture_metadata(first, 0)
    run(first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(first)
    for lengths in ([1, 64, 65, 700, 2500], [1] * rows, [2560] * rows, [3, 2000, 1, 1, 130]):
        batch = step(lengths)
        backend.init_replay_metadata(batch)
        graph.replay()
        batch.page_tables = [table]
        reference.init_forward_metadata(batch)
        expected = reference.forward_decode(q, cache.layer(0), layer, batch)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)

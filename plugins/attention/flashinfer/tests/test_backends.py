"""Both backends pass core's suite over a stand-in that computes what FlashInfer documents: page lists, plans, strides and turns are theirs to get right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenspeed_plugin_attention_flashinfer.backend import FlashInferBackend
from tokenspeed_plugin_attention_flashinfer.latent import FlashInferLatentBackend
from tokenspeed_plugin_attention_flashinfer.plugin import tokenspeed_attention_backends
from tokenspeed_plugin_attention_flashinfer.wrappers import Turns

from tokenspeed.errors import PluginError
from tokenspeed.interfaces.attention import AttentionLayer
from tokenspeed.testing.attention import AttentionBackendSuite
from tokenspeed.testing.harness import attention_context
from tokenspeed.testing.paged import PagedCache, Session
from tokenspeed.types import CacheGroup

HEADS, LATENTS = tokenspeed_attention_backends()
FP32 = {"dtypes": ("fp32",), "kv_dtypes": ("fp32",)}
FULL = CacheGroup(kind="full", layers=(0,), kv_heads=2, head_dim=64, v_head_dim=64)
LATENT = CacheGroup(kind="mla", layers=(0,), kv_heads=1, head_dim=576, v_head_dim=512)


@pytest.mark.usefixtures("stand_in")
class TestHeads(AttentionBackendSuite):
    spec = replace(HEADS, supports=replace(HEADS.supports, **FP32, page_sizes=(4, 16)))


@pytest.mark.usefixtures("stand_in")
class TestHeadsInTheirPages(AttentionBackendSuite):
    """No prompt's keys and values are gathered."""

    spec = replace(HEADS, supports=replace(HEADS.supports, **FP32, page_sizes=(4,), head_dims=(64,)))
    heads = ((6, 2),)

    @pytest.fixture(autouse=True)
    def no_gather(self, monkeypatch):
        monkeypatch.setattr("tokenspeed_plugin_attention_flashinfer.backend._GATHER_LIMIT", 0)


@pytest.mark.usefixtures("stand_in")
class TestLatents(AttentionBackendSuite):
    spec = replace(LATENTS, supports=replace(LATENTS.supports, **FP32, page_sizes=(4, 16)))
    latents = ((4, 512, 64), (16, 512, 64))


def prepared(backend, cache, lengths):
    """One decode step of rows that hold so many tokens."""
    sessions = [Session() for _ in lengths]
    cache.batch(extend=[(session, [0] * n) for session, n in zip(sessions, lengths, strict=True)])
    for layer in (cache.layer(0).k, cache.layer(0).v):
        layer.zero_()
    batch = cache.batch(decode=[(session, [0]) for session in sessions])
    backend.init_forward_metadata(batch)
    return batch


def test_a_plan_is_not_overwritten_while_its_step_may_wait_to_run(stand_in):
    """Steps take turns between two wrappers; layers with other constants have a pair of their own; layers with the same share a plan."""
    backend = FlashInferBackend(attention_context(FULL, 4))
    cache = PagedCache([FULL])
    layers = [
        AttentionLayer(index=0, scale=0.1),
        AttentionLayer(index=0, scale=0.1),
        AttentionLayer(index=0, scale=0.2),
    ]
    used = []
    for _ in range(3):
        batch = prepared(backend, cache, [3, 9])
        before = {id(wrapper): wrapper.plans for wrapper in stand_in}
        for layer in layers:
            backend.forward_decode(torch.zeros(2, 4, 64), cache.layer(0), layer, batch)
        used.append({id(w) for w in stand_in if w.plans > before.get(id(w), 0)})
        assert all(w.plans - before.get(id(w), 0) <= 1 for w in stand_in)
    assert [len(step) for step in used] == [2, 2, 2]
    assert not used[0] & used[1]
    assert used[0] == used[2]


def test_turns_stay_where_a_step_planned_nothing():
    turns = Turns(lambda: object())
    first = turns.planned((1,), lambda _: None)
    turns.next_step()
    turns.next_step()
    assert turns.planned((1,), lambda _: None) is not first, "the step without a plan took no turn"


@pytest.mark.usefixtures("stand_in")
def test_latents_are_planned_before_the_first_layer_once_layers_are_bound():
    """A captured decode is replayed without calling a layer: what its launches read must be there when metadata is prepared."""
    backend = FlashInferLatentBackend(attention_context(LATENT, 16))
    backend.bind_layers([AttentionLayer(index=0, scale=0.1), AttentionLayer(index=1, scale=0.1)])
    cache = PagedCache([LATENT])
    prepared(backend, cache, [5, 17])
    wrapper = backend._phases["decode"].wrapper
    assert wrapper.lengths.tolist() == [6, 18]
    assert wrapper.scale == 0.1
    assert wrapper.causal is False, "one token a row"
    columns = wrapper.lists[1] - wrapper.lists[0]
    assert columns * backend.ctx.page_size >= backend.ctx.max_model_len
    assert wrapper.indices.data_ptr() == backend._tables.data_ptr(), "a graph reads the buffer that every plan names"
    assert backend.graph_variants == (0,)


@pytest.mark.usefixtures("stand_in")
def test_every_run_of_a_capture_copies_its_own_page_table():
    """A capture calls the layers twice for one prepared step, each time with tables made anew: the second run must not take the first one's."""
    backend = FlashInferLatentBackend(attention_context(LATENT, 16))
    cache, layer = PagedCache([LATENT]), AttentionLayer(index=0, scale=0.1)
    batch = prepared(backend, cache, [5, 17])
    q = torch.zeros(2, 16, 576)
    backend.forward_decode(q, cache.layer(0), layer, batch)
    batch.page_tables = [batch.page_tables[0].clone()]
    backend._tables.fill_(-1)
    backend.forward_decode(q, cache.layer(0), layer, batch)
    held = backend._tables.view(64, -1)
    assert torch.equal(held[:2, : batch.page_tables[0].shape[1]], batch.page_tables[0])
    backend._tables.fill_(-1)
    batch.seq_lens = batch.seq_lens.clone()
    backend.forward_extend(q[:0], cache.layer(0), layer, batch)
    assert held.eq(-1).all(), "layers of one run share the copy"


@pytest.mark.parametrize(
    ("group", "heads", "more", "message"),
    [
        (LATENT, 40, {}, "a number of query heads that divides 128, not 40"),
        (FULL, 16, {}, "not a group of kind full"),
        (replace(LATENT, head_dim=320, v_head_dim=256), 16, {}, r"not a group of kind mla with 256 \+ 64"),
        (LATENT, 128, {"max_tokens": 16384}, "at most 15744 tokens of 128 heads, not 16384; lower --chunked-prefill"),
    ],
)
@pytest.mark.usefixtures("stand_in")
def test_latents_that_the_kernel_cannot_read_are_refused_at_start(group, heads, more, message):
    with pytest.raises(PluginError, match=message):
        FlashInferLatentBackend(attention_context(group, heads, **more))


@pytest.mark.usefixtures("stand_in")
def test_layers_that_the_kernels_do_not_compute_are_refused_when_they_are_bound():
    latents = FlashInferLatentBackend(attention_context(LATENT, 16))
    sinks = torch.zeros(16)
    for layer in (
        AttentionLayer(index=3, scale=0.1, window=8),
        AttentionLayer(index=3, scale=0.1, softcap=5.0),
        AttentionLayer(index=3, scale=0.1, sinks=sinks),
    ):
        with pytest.raises(PluginError, match="which layer 3 needs"):
            latents.bind_layers([layer])
    with pytest.raises(PluginError, match="these have several scales"):
        latents.bind_layers([AttentionLayer(index=0, scale=0.1), AttentionLayer(index=1, scale=0.2)])
    with pytest.raises(PluginError, match="has no sinks, which layer 3 needs"):
        FlashInferBackend(attention_context(FULL, 4)).bind_layers([AttentionLayer(index=3, scale=0.1, sinks=sinks)])


@pytest.mark.usefixtures("stand_in")
def test_a_pool_beyond_what_the_kernel_can_address_is_refused_when_it_is_bound():
    """It multiplies page numbers in 32 bits: further pages would be read from the wrong place, and warm-up runs over a few pages alone."""
    backend = FlashInferLatentBackend(attention_context(LATENT, 16))
    kv = PagedCache([LATENT]).layer(0)
    most = 2**32 // (4 * 576)
    backend.bind_pages([replace(kv, k=torch.empty((most, 4, 1, 576), device="meta"))])
    with pytest.raises(PluginError, match="reads at most 4294967296 elements"):
        backend.bind_pages([kv, replace(kv, k=torch.empty((most + 1, 4, 1, 576), device="meta"))])


def test_a_library_that_cannot_be_imported_is_named_cause_first(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    with pytest.raises(PluginError, match=r"(?s)ModuleNotFoundError.*flashinfer cannot be imported"):
        FlashInferBackend(attention_context(FULL, 4))


def test_page_lists_start_where_the_last_one_ends():
    from tokenspeed_plugin_attention_flashinfer.pages import starts

    assert starts(np.array([3, 1, 4])).tolist() == [0, 3, 4, 8]

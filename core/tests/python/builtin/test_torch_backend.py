"""The reference backend passes the suite that other backends are measured with."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenspeed.builtin.attention.torch_backend import TorchAttention
from tokenspeed.builtin.kernels.cache import write_latent
from tokenspeed.builtin.plugin import tokenspeed_attention_backends, tokenspeed_platforms
from tokenspeed.interfaces.attention import AttentionLayer, LatentUp
from tokenspeed.testing.attention import AttentionBackendSuite
from tokenspeed.testing.harness import attention_context
from tokenspeed.testing.paged import PagedCache, Session
from tokenspeed.testing.platform import PlatformSuite
from tokenspeed.types import CacheGroup


class TestTorchBackend(AttentionBackendSuite):
    spec = tokenspeed_attention_backends()[0]


class TestCpuPlatform(PlatformSuite):
    spec = tokenspeed_platforms()[0]


def test_absorbed_queries_see_what_heads_see_in_expanded_latents():
    """Attention in the space of latents is that of every head's own keys and values."""
    torch.manual_seed(0)
    heads, nope, rope, rank, v_dim, tokens = 3, 8, 4, 16, 6, 9
    group = CacheGroup(kind="mla", layers=(0,), kv_heads=1, head_dim=rank + rope, v_head_dim=rank)
    cache = PagedCache([group])
    batch = cache.batch(extend=[(Session(), [0] * tokens)])
    latent, key_rope = torch.randn(tokens, rank), torch.randn(tokens, rope)
    write_latent(latent, key_rope, cache.layer(0).k, batch.slot_mapping[0], "NHD")
    up = LatentUp(keys=torch.randn(heads, nope, rank), values=torch.randn(heads, v_dim, rank))
    layer = AttentionLayer(index=0, scale=0.1, latent=up)
    q = torch.randn(tokens, heads, nope + rope)
    got = TorchAttention(attention_context(group, heads)).forward_extend_heads(q, cache.layer(0), layer, batch)
    keys = torch.cat((torch.einsum("tr,hnr->htn", latent, up.keys), key_rope.expand(heads, -1, -1)), dim=-1)
    values = torch.einsum("tr,hvr->htv", latent, up.values)
    expected = functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, is_causal=True, scale=0.1)
    torch.testing.assert_close(got, expected.transpose(0, 1), rtol=1e-4, atol=1e-4)

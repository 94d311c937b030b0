"""The conformance suites, under the interpreter: fp32, as it computes with bf16's bits; fp8 pages."""

from dataclasses import replace

from tokenspeed_plugin_attention_mla.plugin import tokenspeed_attention_backends

from tokenspeed.testing.attention import AttentionBackendSuite

_SPEC = tokenspeed_attention_backends()[0]


class TestMlaBackend(AttentionBackendSuite):
    spec = replace(_SPEC, supports=replace(_SPEC.supports, dtypes=("fp32",), page_sizes=(16, 32), layouts=("HND",)))
    latents = ((5, 32, 16),)

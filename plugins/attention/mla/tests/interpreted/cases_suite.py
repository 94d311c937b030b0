"""The conformance suites, under the interpreter: fp32, as it computes with bf16's bits; fp8 pages are read, not written, as it rounds them its own way."""

from dataclasses import replace

from tokenspeed_plugin_attention_mla.plugin import tokenspeed_attention_backends, tokenspeed_kernels

from tokenspeed.testing.attention import AttentionBackendSuite
from tokenspeed.testing.kernel import KernelSuite

_SPEC = tokenspeed_attention_backends()[0]
_WRITE = tokenspeed_kernels()[0]


class TestMlaBackend(AttentionBackendSuite):
    spec = replace(_SPEC, supports=replace(_SPEC.supports, dtypes=("fp32",), page_sizes=(16, 32), layouts=("HND",)))
    latents = ((5, 32, 16),)


class TestWriteLatent(KernelSuite):
    spec = replace(_WRITE, dtypes=("fp32",), features=_WRITE.features - {"kv_fp8"})
    platform, capability = "cuda", (9, 0)

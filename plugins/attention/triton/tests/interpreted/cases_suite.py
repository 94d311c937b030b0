"""Core's conformance suite under the interpreter, in the smallest shape; ``test_gpu`` of the platform runs all that the spec lists."""

from dataclasses import replace

from tokenspeed_plugin_attention_triton.plugin import tokenspeed_attention_backends

from tokenspeed.testing.attention import AttentionBackendSuite

_SPEC = tokenspeed_attention_backends()[0]
_SMALLEST = replace(
    _SPEC.supports, page_sizes=(16,), head_dims=(16,), layouts=("NHD",), dtypes=("fp32",), kv_dtypes=("fp32",)
)


class TestTritonBackend(AttentionBackendSuite):
    spec = replace(_SPEC, supports=_SMALLEST)
    heads = ((2, 1),)

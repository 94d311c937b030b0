"""The conformance suite under the interpreter: the backend whole, with its plan, intervals beside prompts, windows and sinks.

In fp32, as the interpreter computes with bf16's bits; with pages that hold a block of the kernels (64 tokens) and pages that do not. ``test_gpu`` runs all that
the spec lists.
"""

from dataclasses import replace

from tokenspeed_plugin_attention_triton.plugin import tokenspeed_attention_backends

from tokenspeed.testing.attention import AttentionBackendSuite

_SPEC = tokenspeed_attention_backends()[0]
_SUPPORTS = replace(_SPEC.supports, dtypes=("fp32",), head_dims=(16,))


class TestTritonBackend(AttentionBackendSuite):
    spec = replace(_SPEC, supports=replace(_SUPPORTS, kv_dtypes=("fp32", "fp8"), layouts=("HND",), page_sizes=(64, 16)))
    heads = ((4, 2),)


class TestTokensBeforeHeads(AttentionBackendSuite):
    """The other layout, and a KV head for each query head."""

    spec = replace(_SPEC, supports=replace(_SUPPORTS, kv_dtypes=("fp32",), layouts=("NHD",), page_sizes=(16,)))
    heads = ((2, 2),)

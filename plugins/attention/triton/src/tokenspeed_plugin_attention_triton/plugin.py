"""Attention backend ``triton``: portable, with shared-prefix decode."""

from __future__ import annotations

from tokenspeed.plugins import AttentionBackendSpec, AttentionSupport, Priority, hookimpl


@hookimpl
def tokenspeed_attention_backends() -> list[AttentionBackendSpec]:
    """The one backend of this plugin."""
    return [
        AttentionBackendSpec(
            name="triton",
            target="tokenspeed_plugin_attention_triton.backend:TritonBackend",
            priority=Priority.PORTABLE,
            platforms=("cuda", "rocm"),
            requires=("triton>=3.4",),
            supports=AttentionSupport(
                kinds=("mha", "gqa", "window"),
                dtypes=("bf16", "fp16", "fp32"),
                kv_dtypes=("bf16", "fp16", "fp32", "fp8"),
                layouts=("HND", "NHD"),
                page_sizes=(64, 32, 16, 128),
                sinks=True,
                softcap=True,
                shared_prefix=True,
            ),
            description="split-KV and shared-prefix decode, paged extend",
        )
    ]

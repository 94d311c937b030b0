"""Attention backends ``flashinfer`` and ``flashinfer-mla``."""

from __future__ import annotations

from tokenspeed.plugins import AttentionBackendSpec, AttentionSupport, OptionSpec, Priority, hookimpl


@hookimpl
def tokenspeed_attention_backends() -> list[AttentionBackendSpec]:
    """One for heads with keys and values of their own, one for latents."""
    return [
        AttentionBackendSpec(
            name="flashinfer",
            target="tokenspeed_plugin_attention_flashinfer.backend:FlashInferBackend",
            priority=Priority.PERFORMANT,
            platforms=("cuda",),
            requires=("flashinfer-python>=0.6",),
            probe="tokenspeed_plugin_attention_flashinfer.toolkit:lacking",
            supports=AttentionSupport(
                kinds=("mha", "gqa"),
                dtypes=("bf16", "fp16"),
                kv_dtypes=("bf16", "fp16"),
                head_dims=(64, 128, 256),
                layouts=("HND", "NHD"),
                page_sizes=(64, 32, 16, 128),
                softcap=True,
            ),
            description="paged prefill (FlashAttention 3 on Hopper) and paged decode",
        ),
        AttentionBackendSpec(
            name="flashinfer-mla",
            target="tokenspeed_plugin_attention_flashinfer.latent:FlashInferLatentBackend",
            priority=Priority.PORTABLE,  # the plugin attention-mla goes first: it takes fp8 and expands long prompts
            platforms=("cuda",),
            requires=("flashinfer-python>=0.6",),
            probe="tokenspeed_plugin_attention_flashinfer.toolkit:lacking_latents",
            supports=AttentionSupport(
                kinds=("mla",),
                dtypes=("bf16", "fp16"),
                kv_dtypes=("bf16", "fp16"),
                head_dims=(576,),
                page_sizes=(64, 32, 16, 128),
            ),
            description="multi-head latent attention of 512 + 64 elements over absorbed queries",
        ),
    ]


@hookimpl
def tokenspeed_options() -> list[OptionSpec]:
    """Workspace size."""
    return [
        OptionSpec(
            name="workspace_mb",
            type=int,
            default=256,
            minimum=32,
            help="scratch memory in MiB for split-KV partial results",
        )
    ]

"""Attention backend ``mla`` and the kernel that writes its latents."""

from __future__ import annotations

from tokenspeed.plugins import AttentionBackendSpec, AttentionSupport, KernelSpec, OptionSpec, Priority, hookimpl

_PACKAGE = "tokenspeed_plugin_attention_mla"
_DTYPES = ("bf16", "fp16", "fp32")


@hookimpl
def tokenspeed_attention_backends() -> list[AttentionBackendSpec]:
    """The one backend of this plugin."""
    return [
        AttentionBackendSpec(
            name="mla",
            target=f"{_PACKAGE}.backend:MlaBackend",
            priority=Priority.PERFORMANT,
            platforms=("cuda", "rocm"),
            requires=("triton>=3.4",),
            supports=AttentionSupport(
                kinds=("mla",),
                dtypes=_DTYPES,
                kv_dtypes=(*_DTYPES, "fp8"),
                head_dims=(576, 320),
                page_sizes=(64, 32, 16),
            ),
            description="multi-head latent attention, each latent read once",
        )
    ]


@hookimpl
def tokenspeed_options() -> list[OptionSpec]:
    """Workspace size."""
    text = (
        "memory in MiB for the expanded keys and values of prompts; heads are done in turns where all at once need more"
    )
    return [OptionSpec(name="workspace_mb", type=int, default=1024, minimum=16, help=text)]


@hookimpl
def tokenspeed_kernels() -> list[KernelSpec]:
    """Latents into pages."""
    return [
        KernelSpec(
            name="triton",
            target=f"{_PACKAGE}.pack:write_latent",
            platforms=("cuda", "rocm"),
            requires=("triton>=3.4",),
            family="cache",
            mode="write_latent",
            features=frozenset({"kv_fp8", "kv_bf16", "kv_fp16", "kv_fp32"}),
            dtypes=_DTYPES,
            description="both parts of a row in one pass, fp8 with a scale",
        )
    ]

"""Attention backend ``mla`` and the kernel that writes its latents."""

from __future__ import annotations

from tokenspeed.plugins import AttentionBackendSpec, AttentionSupport, KernelSpec, OptionSpec, Priority, hookimpl

_NEEDS = ("triton>=3.4",)
_PLATFORMS = ("cuda", "rocm")


@hookimpl
def tokenspeed_attention_backends() -> list[AttentionBackendSpec]:
    """The one backend of this plugin."""
    supports = AttentionSupport(
        kinds=("mla",),
        dtypes=("bf16", "fp16", "fp32"),
        kv_dtypes=("bf16", "fp16", "fp32", "fp8"),
        head_dims=(576, 320),
        layouts=("NHD", "HND"),
        page_sizes=(64, 32, 16),
    )
    target, text = (
        "tokenspeed_plugin_attention_mla.backend:MlaBackend",
        "multi-head latent attention, latents read once",
    )
    return [
        AttentionBackendSpec(
            name="mla",
            target=target,
            priority=Priority.PERFORMANT,
            platforms=_PLATFORMS,
            requires=_NEEDS,
            supports=supports,
            description=text,
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
            target="tokenspeed_plugin_attention_mla.pack:write_latent",
            priority=Priority.PORTABLE,
            platforms=_PLATFORMS,
            requires=_NEEDS,
            family="cache",
            mode="write_latent",
            features=frozenset({"kv_fp8", "kv_bf16", "kv_fp16", "kv_fp32"}),
            dtypes=("bf16", "fp16", "fp32"),
            layouts=("NHD", "HND"),
            description="both parts of a row in one pass, fp8 with a scale",
        )
    ]

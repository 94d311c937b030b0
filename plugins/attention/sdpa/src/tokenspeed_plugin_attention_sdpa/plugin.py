"""What the plugin contributes. Imports nothing heavy."""

from __future__ import annotations

from tokenspeed.plugins import AttentionBackendSpec, AttentionSupport, KernelSpec, Priority, hookimpl

_PACKAGE = "tokenspeed_plugin_attention_sdpa"
_DTYPES = ("fp32", "bf16", "fp16")


@hookimpl
def tokenspeed_attention_backends() -> list[AttentionBackendSpec]:
    """The backend that a CPU takes."""
    return [
        AttentionBackendSpec(
            name="sdpa",
            target=f"{_PACKAGE}.backend:SdpaAttention",
            priority=Priority.PERFORMANT,
            platforms=("cpu",),
            supports=AttentionSupport(
                kinds=("mha", "gqa", "window"),
                dtypes=_DTYPES,
                kv_dtypes=_DTYPES,
                sinks=True,
                softcap=True,
                shared_prefix=True,
            ),
            asks=("attention.decode", "attention.extend"),
            description="batched attention over the fastest installed CPU kernels",
        )
    ]


@hookimpl
def tokenspeed_kernels() -> list[KernelSpec]:
    """Kernels for when nothing faster is installed."""
    return [_kernel("decode"), _kernel("extend")]


def _kernel(mode: str) -> KernelSpec:
    return KernelSpec(
        name="sdpa",
        target=f"{_PACKAGE}.kernels:{mode}",
        priority=Priority.PORTABLE,
        platforms=("cpu",),
        family="attention",
        mode=mode,
        features=frozenset({"window"}),
        dtypes=_DTYPES,
        description="torch's scaled dot product attention over gathered pages",
    )

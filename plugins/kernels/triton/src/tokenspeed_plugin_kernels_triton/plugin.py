"""Portable Triton kernels for NVIDIA and AMD GPUs."""

from __future__ import annotations

from tokenspeed.plugins import CommandSpec, KernelSpec, OptionSpec, Priority, hookimpl

_HALF = ("bf16", "fp16")
_ALL = ("bf16", "fp16", "fp32")
_KV_CASTS = frozenset({"kv_bf16", "kv_fp16", "kv_fp32", "kv_fp8"})  # pages of another element type than the rest


def _kernel(
    family: str,
    mode: str,
    target: str,
    dtypes: tuple[str, ...],
    *,
    factory: bool = False,
    features: frozenset[str] = frozenset(),
    tells: str = "",
) -> KernelSpec:
    return KernelSpec(
        name="triton",
        family=family,
        mode=mode,
        target=f"tokenspeed_plugin_kernels_triton.{target}",
        priority=Priority.PERFORMANT,
        platforms=("cuda", "rocm"),
        requires=("triton>=3.4",),
        dtypes=dtypes,
        factory=factory,
        features=features,
        tells=f"tokenspeed_plugin_kernels_triton.{tells}" if tells else "",
    )


@hookimpl
def tokenspeed_kernels() -> list[KernelSpec]:
    """One solution, ``triton``, for each mode."""
    return [
        _kernel("gemm", "linear", "gemm:linear", _HALF, factory=True, tells="tuning:tells"),
        _kernel("gemm", "linear_silu_mul", "gemm:linear_silu_mul", _HALF, factory=True, tells="tuning:tells_gated"),
        _kernel("norm", "rms_norm", "norm:rms_norm", _ALL),
        _kernel("norm", "add_rms_norm", "norm:add_rms_norm", _ALL),
        _kernel("rope", "qkv_rope_write", "rope:qkv_rope_write", _ALL, features=_KV_CASTS | {"gate"}),
        _kernel("activation", "silu_and_mul", "activation:silu_and_mul", _ALL),
        _kernel("activation", "gelu_tanh_and_mul", "activation:gelu_tanh_and_mul", _ALL),
        _kernel("embedding", "lookup", "cache:lookup", _ALL),
        _kernel("cache", "write", "cache:write", _ALL, features=_KV_CASTS),
        # Blocks of memory, whatever they hold.
        _kernel("cache", "copy", "pages:copy", ()),
        _kernel("cache", "zero", "pages:zero", ()),
        _kernel("recurrent", "copy", "pages:copy", ()),
        _kernel("recurrent", "zero", "pages:zero", ()),
        _kernel("sampling", "argmax", "sampling:argmax", _ALL),
        _kernel("sampling", "draw", "draw:draw", _ALL),
        _kernel("sampling", "apply_bitmask", "sampling:apply_bitmask", _ALL),
    ]


@hookimpl
def tokenspeed_options() -> list[OptionSpec]:
    """Where tiles of another card are."""
    text = "file of `tokenspeed tune-gemm --out`: tiles of products of 1 to 32 rows, searched on this very card"
    return [OptionSpec(name="tiles", type=str, default="", help=text)]


@hookimpl
def tokenspeed_commands() -> list[CommandSpec]:
    """The search for tiles."""
    module, text = "tokenspeed_plugin_kernels_triton.search", "search tiles of products of few rows on this GPU"
    return [CommandSpec(name="tune-gemm", target=module, help=text)]

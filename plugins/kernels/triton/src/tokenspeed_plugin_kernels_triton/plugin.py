"""Portable Triton kernels for NVIDIA and AMD GPUs."""

from __future__ import annotations

from typing import Any

from tokenspeed.plugins import CommandSpec, KernelSpec, OptionSpec, Priority, hookimpl

_ALL = ("bf16", "fp16", "fp32")
_TILED: dict[str, Any] = {"dtypes": ("bf16", "fp16"), "factory": True}
_KV_CASTS = frozenset({"kv_bf16", "kv_fp16", "kv_fp32", "kv_fp8"})  # pages of another element type than the rest


def _kernel(operation: str, target: str, *, dtypes: tuple[str, ...] = _ALL, tells: str = "", **more: Any) -> KernelSpec:
    family, mode = operation.split(".")
    module = "tokenspeed_plugin_kernels_triton."
    return KernelSpec(
        name="triton", family=family, mode=mode, target=module + target, priority=Priority.PERFORMANT, platforms=("cuda", "rocm"),
        requires=("triton>=3.4",), dtypes=dtypes, tells=module + tells if tells else "", **more,
    )  # fmt: skip


@hookimpl
def tokenspeed_kernels() -> list[KernelSpec]:
    """One solution, ``triton``, for each mode; pages and states are blocks of memory, whatever they hold."""
    return [
        _kernel("gemm.linear", "gemm:linear", tells="tuning:tells", **_TILED),
        _kernel("gemm.linear_silu_mul", "gemm:linear_silu_mul", tells="tuning:tells_gated", **_TILED),
        _kernel("norm.rms_norm", "norm:rms_norm"),
        _kernel("norm.add_rms_norm", "norm:add_rms_norm"),
        _kernel("rope.qkv_rope_write", "rope:qkv_rope_write", features=_KV_CASTS | {"gate"}),
        _kernel("activation.silu_and_mul", "activation:silu_and_mul"),
        _kernel("activation.gelu_tanh_and_mul", "activation:gelu_tanh_and_mul"),
        _kernel("embedding.lookup", "cache:lookup"),
        _kernel("cache.write", "cache:write", features=_KV_CASTS),
        _kernel("cache.copy", "pages:copy", dtypes=()),
        _kernel("cache.zero", "pages:zero", dtypes=()),
        _kernel("recurrent.copy", "pages:copy", dtypes=()),
        _kernel("recurrent.zero", "pages:zero", dtypes=()),
        _kernel("sampling.argmax", "sampling:argmax"),
        _kernel("sampling.draw", "draw:draw"),
        _kernel("sampling.apply_bitmask", "sampling:apply_bitmask"),
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

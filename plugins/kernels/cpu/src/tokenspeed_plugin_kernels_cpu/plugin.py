"""What the plugin contributes: a kernel per family and mode, and two options. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from tokenspeed.plugins import KernelSpec, OptionSpec, Priority, hookimpl

_CASTS = frozenset({"kv_fp32", "kv_bf16"})  # the cache may be of the other type
_ATTENTION = _CASTS | {"window", "softcap", "sinks"}
_FEATURES = {"qkv_rope_write": _CASTS, "write": _CASTS, "decode": _ATTENTION | {"shared_prefix"}, "extend": _ATTENTION}
_MODES = (
    "gemm.linear gemm.linear_silu_mul norm.rms_norm norm.add_rms_norm rope.rotate rope.qkv_rope_write cache.write embedding.lookup "
    "activation.silu_and_mul activation.gelu_tanh_and_mul attention.decode attention.extend sampling.argmax"
)


@hookimpl
def tokenspeed_kernels() -> list[KernelSpec]:
    """Factories over the rank's one thread pool."""
    common: dict[str, Any] = {"name": "cpu", "factory": True, "platforms": ("cpu",), "dtypes": ("fp32", "bf16")}
    return [
        KernelSpec(family=family, mode=mode, target=f"tokenspeed_plugin_kernels_cpu.runtime:make_{family}_{mode}",
                   priority=Priority.PERFORMANT, features=_FEATURES.get(mode, frozenset()), **common)
        for family, mode in (name.split(".") for name in _MODES.split())
    ]  # fmt: skip


@hookimpl
def tokenspeed_options() -> list[OptionSpec]:
    """Set with ``--set kernels-cpu.isa=avx2``, ``--set kernels-cpu.threads=1``."""
    isas = ("", "avx512_bf16", "avx512", "avx2", "portable")
    threads = "threads of the kernels; 0 takes the rank's share of the processors"
    return [
        OptionSpec(name="isa", type=str, default="", choices=isas, help="instruction set; empty takes the best"),
        OptionSpec(name="threads", type=int, default=0, minimum=0, maximum=1024, help=threads),
    ]

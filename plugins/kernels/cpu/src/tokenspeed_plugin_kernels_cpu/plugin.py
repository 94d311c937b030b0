"""What the plugin contributes: a kernel per family and mode, and the choice of the instruction set."""

from __future__ import annotations

from tokenspeed.plugins import KernelSpec, OptionSpec, Priority, hookimpl

_KERNELS = (
    ("gemm", "linear"),
    ("gemm", "linear_silu_mul"),
    ("norm", "rms_norm"),
    ("norm", "add_rms_norm"),
    ("rope", "rotate"),
    ("rope", "qkv_rope_write"),
    ("activation", "silu_and_mul"),
    ("activation", "gelu_tanh_and_mul"),
    ("embedding", "lookup"),
    ("cache", "write"),
    ("attention", "decode"),
    ("attention", "extend"),
    ("sampling", "argmax"),
)
_FEATURES = {
    "decode": frozenset({"window", "sinks", "softcap", "shared_prefix", "batch_invariant"}),
    "extend": frozenset({"window", "sinks", "softcap", "batch_invariant"}),
}


@hookimpl
def tokenspeed_kernels() -> list[KernelSpec]:
    """Every kernel takes fp32 and bf16 on the CPU platform; its factory makes it over the rank's one thread pool."""
    package = "tokenspeed_plugin_kernels_cpu"
    common = {"name": "cpu", "priority": Priority.PERFORMANT, "platforms": ("cpu",), "dtypes": ("fp32", "bf16"), "factory": True}
    return [KernelSpec(family=f, mode=m, target=f"{package}.{f}:make_{m}", features=_FEATURES.get(m, frozenset()), **common) for f, m in _KERNELS]


@hookimpl
def tokenspeed_options() -> list[OptionSpec]:
    """``--set kernels-cpu.isa=avx2`` and the like; empty takes the best that the processor has."""
    choices = ("", "avx512_bf16", "avx512", "avx2", "portable")
    return [OptionSpec(name="isa", type=str, default="", choices=choices, help="instruction set of the kernels")]

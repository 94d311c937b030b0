"""The references as specs. Torch-free; the modules beside it are imported on first use."""

from __future__ import annotations

from tokenspeed.plugins import KernelSpec, Priority

__all__ = ["REFERENCE_KERNELS"]

# The element type of the pages may differ from that of the rest.
_KV_CASTS = frozenset({"kv_fp32", "kv_bf16", "kv_fp16", "kv_fp8"})
_ATTENTION = frozenset({"window", "softcap", "sinks"}) | _KV_CASTS


def _spec(
    family: str, mode: str, features: frozenset[str] = frozenset(), objectives: tuple[str, ...] = ()
) -> KernelSpec:
    return KernelSpec(
        name="torch",
        target=f"tokenspeed.builtin.kernels.{family}:{mode}",
        priority=Priority.REFERENCE,
        family=family,
        mode=mode,
        features=features,
        objectives=objectives,
        description="torch reference",
    )


REFERENCE_KERNELS: tuple[KernelSpec, ...] = (
    _spec("gemm", "linear"),
    # A fusion gains nothing in the reference: layers use the two kernels it stands for, unless debugging asks for this one.
    _spec("gemm", "linear_silu_mul", objectives=("debug",)),
    _spec("norm", "rms_norm"),
    _spec("norm", "add_rms_norm"),
    _spec("rope", "rotate"),
    _spec("rope", "qkv_rope_write", _KV_CASTS | {"gate"}),
    _spec("activation", "silu_and_mul"),
    _spec("activation", "gelu_tanh_and_mul"),
    _spec("embedding", "lookup"),
    _spec("cache", "write", _KV_CASTS),
    _spec("cache", "write_latent", _KV_CASTS),
    _spec("cache", "copy"),
    _spec("cache", "zero"),
    _spec("moe", "route", frozenset({"sigmoid", "bias", "groups"})),
    _spec("moe", "experts"),
    _spec("recurrent", "copy"),
    _spec("recurrent", "zero"),
    _spec("recurrent", "gated_linear"),
    _spec("comm", "all_reduce"),
    _spec("comm", "all_gather"),
    _spec("comm", "reduce_scatter"),
    _spec("attention", "decode", _ATTENTION),
    _spec("attention", "extend", _ATTENTION),
    _spec("sampling", "argmax"),
    _spec("sampling", "draw"),
    _spec("sampling", "apply_bitmask"),
)

"""The conformance suites of the kernels that the interpreter runs quickly and rightly; those of all run on a device (``test_gpu.py``).

Left out: fp8, which the interpreter rounds in a way of its own, and products of bf16, which it gets wrong; ``cases_kernels.py`` has both in other types.
"""

from __future__ import annotations

from dataclasses import replace

from tokenspeed_plugin_kernels_triton.plugin import tokenspeed_kernels

from tokenspeed.plugins import KernelSpec
from tokenspeed.testing.kernel import KernelSuite

SLOW = {"gemm.linear", "gemm.linear_silu_mul", "rope.qkv_rope_write", "sampling.draw"}


def suite(spec: KernelSpec) -> type:
    plain = replace(spec, features=spec.features - {"kv_fp8"}, dtypes=("fp32", "bf16"))
    name = f"Test_{spec.family}_{spec.mode}"
    return type(name, (KernelSuite,), {"spec": plain, "__module__": __name__, "platform": "cuda", "capability": (9, 0)})


for _spec in tokenspeed_kernels():
    if f"{_spec.family}.{_spec.mode}" not in SLOW:
        globals()[f"Test_{_spec.family}_{_spec.mode}"] = suite(_spec)

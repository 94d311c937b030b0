"""Every kernel of the plugin against the torch references, through the registry: the suites that core ships."""

from __future__ import annotations

from tokenspeed_plugin_kernels_cpu.plugin import tokenspeed_kernels

from tokenspeed.plugins import KernelSpec
from tokenspeed.testing.kernel import KernelSuite

SPECS = {(spec.family, spec.mode): spec for spec in tokenspeed_kernels()}


def suite(family: str, mode: str) -> type[KernelSuite]:
    """A suite for one spec on two threads."""
    spec: KernelSpec = SPECS.pop((family, mode))
    return type("Suite", (KernelSuite,), {"spec": spec, "threads": 2, "__module__": __name__})


TestLinear = suite("gemm", "linear")
TestLinearSiluMul = suite("gemm", "linear_silu_mul")
TestRmsNorm = suite("norm", "rms_norm")
TestAddRmsNorm = suite("norm", "add_rms_norm")
TestRotate = suite("rope", "rotate")
TestQkvRopeWrite = suite("rope", "qkv_rope_write")
TestSiluAndMul = suite("activation", "silu_and_mul")
TestGeluTanhAndMul = suite("activation", "gelu_tanh_and_mul")
TestLookup = suite("embedding", "lookup")
TestWrite = suite("cache", "write")
TestDecode = suite("attention", "decode")
TestExtend = suite("attention", "extend")
TestArgmax = suite("sampling", "argmax")


def test_every_kernel_has_a_suite() -> None:
    assert not SPECS

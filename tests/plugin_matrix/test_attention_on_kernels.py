"""Attention backends over kernels of other plugins pass core's suite too: what one chooses is only known where both are installed."""

from __future__ import annotations

from tokenspeed_plugin_attention_sdpa.plugin import tokenspeed_attention_backends
from tokenspeed_plugin_kernels_cpu.plugin import tokenspeed_kernels

from tokenspeed.testing.attention import AttentionBackendSuite


class TestSdpaOnCpuKernels(AttentionBackendSuite):
    spec = tokenspeed_attention_backends()[0]
    kernels = tuple(tokenspeed_kernels())
    heads = ((6, 2),)

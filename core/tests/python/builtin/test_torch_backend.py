"""The reference backend passes the suite that other backends are measured with."""

from __future__ import annotations

from tokenspeed.builtin.plugin import tokenspeed_attention_backends, tokenspeed_platforms
from tokenspeed.testing.attention import AttentionBackendSuite
from tokenspeed.testing.platform import PlatformSuite


class TestTorchBackend(AttentionBackendSuite):
    spec = tokenspeed_attention_backends()[0]


class TestCpuPlatform(PlatformSuite):
    spec = tokenspeed_platforms()[0]

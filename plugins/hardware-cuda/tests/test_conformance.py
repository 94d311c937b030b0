"""The platform keeps what core expects of any; what needs a GPU is skipped where there is none."""

from tokenspeed_plugin_hardware_cuda.plugin import tokenspeed_platforms

from tokenspeed.testing.platform import PlatformSuite


class TestCuda(PlatformSuite):
    spec = tokenspeed_platforms()[0]

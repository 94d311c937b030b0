"""The platform keeps what core expects of any; what needs a GPU is skipped where there is none, and runs under ``pytest -m gpu`` where there is one."""

import pytest
from tokenspeed_plugin_hardware_cuda.nvml import detect
from tokenspeed_plugin_hardware_cuda.plugin import tokenspeed_platforms

from tokenspeed.testing.platform import PlatformSuite


class TestCuda(PlatformSuite):
    spec = tokenspeed_platforms()[0]


@pytest.mark.gpu
class TestCudaOnADevice(PlatformSuite):
    spec = tokenspeed_platforms()[0]

    def test_there_is_a_device(self) -> None:
        """Without one the other tests would be skipped unnoticed."""
        assert detect() is not None

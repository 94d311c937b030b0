"""What of the platform can be checked without a GPU: device selection, defaults, and clear words where a driver is missing."""

import subprocess
import sys

import pytest
from tokenspeed_plugin_hardware_cuda import doctor, nvml, platform
from tokenspeed_plugin_hardware_cuda.nvml import Gpu, NvmlError, detect, visible

from tokenspeed.errors import PluginError
from tokenspeed.interfaces.platform import PlatformContext

A = Gpu("NVIDIA H200", "GPU-aaaa", (9, 0), 150 * 2**30)
B = Gpu("NVIDIA B200", "GPU-bbbb", (10, 0), 180 * 2**30)
OLD = Gpu("Tesla T4", "GPU-cccc", (7, 5), 16 * 2**30)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(None, [A, B, OLD]), ("1,0", [B, A]), ("GPU-bb", [B]), ("", []), ("0,9,1", [A]), ("2", [OLD])],
)
def test_visible_devices_follow_the_drivers_rule(setting, expected):
    assert visible([A, B, OLD], setting) == expected


def test_detect_names_the_first_device_that_is_new_enough(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "query", lambda: [OLD, A, B])
    assert detect() == "NVIDIA H200, sm_90, 150 GiB and 1 more"
    monkeypatch.setattr(nvml, "query", lambda: [OLD])
    assert detect() is None


def test_detect_is_none_without_a_driver(monkeypatch):
    def missing():
        raise NvmlError("the NVIDIA driver is not installed")

    monkeypatch.setattr(nvml, "query", missing)
    assert detect() is None


def test_doctor_says_in_a_sentence_that_the_driver_is_missing(monkeypatch):
    def missing():
        raise NvmlError("the NVIDIA driver is not installed")

    monkeypatch.setattr(doctor, "query", missing)
    (finding,) = doctor.findings()
    assert finding.status == "warning"
    assert "driver is not installed" in finding.what
    assert "--device cpu" in finding.advice


def test_assembly_reads_the_platform_without_importing_torch():
    code = (
        "import sys\n"
        "from tokenspeed.interfaces.platform import PlatformContext\n"
        "from tokenspeed_plugin_hardware_cuda import platform\n"
        "from tokenspeed_plugin_hardware_cuda.nvml import Gpu\n"
        "platform.query = lambda: [Gpu('NVIDIA H200', 'GPU-a', (9, 0), 2**37)]\n"
        "p = platform.CudaPlatform(PlatformContext())\n"
        "assert p.capability == (9, 0) and p.defaults.overlap and p.supports_graphs\n"
        "assert p.default_dtype_name('float32') == 'bfloat16' and p.default_dtype_name('float16') == 'float16'\n"
        "assert 'H200' in p.describe() and p.preferences('attention_backend.decode')[0] == 'triton'\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_rank_without_a_device_is_told_how_many_are_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(platform, "query", lambda: [A])
    with pytest.raises(PluginError, match="rank 1 of this host has no GPU: 1 visible"):
        _ = platform.CudaPlatform(PlatformContext(local_rank=1)).capability


def test_a_torch_without_cuda_is_refused_with_advice(monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(PluginError, match="built without CUDA; install a CUDA build"):
        platform.CudaPlatform(PlatformContext()).init_process()

"""What of the platform can be checked without a GPU: device selection, defaults, and clear words where a driver is missing."""

import contextlib
import subprocess
import sys

import pytest
from tokenspeed_plugin_hardware_cuda import doctor, nvml, platform
from tokenspeed_plugin_hardware_cuda.nvml import Gpu, NvmlError, detect, visible

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.errors import ConfigError, PluginError
from tokenspeed.interfaces.platform import PlatformContext
from tokenspeed.weights.describe import describe_model

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


@pytest.mark.parametrize(
    ("gpus", "setting", "why"),
    [
        ([A], None, ""),
        ([OLD, A], None, ""),
        ([OLD], None, "Tesla T4 has compute capability 7.5, and 9.0 or above is needed"),
        ([A, B], "", "none of 2 GPUs is visible (CUDA_VISIBLE_DEVICES)"),
        ([], None, "the NVIDIA driver manages no GPU"),
    ],
)
def test_why_no_device_is_found_is_told_as_the_choice_needs_it(monkeypatch, gpus, setting, why):
    monkeypatch.setattr(nvml, "query", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert nvml.absence() == why
    assert (detect() is None) is bool(why)


def test_a_missing_driver_is_told_where_the_device_was_asked_for(monkeypatch):
    def missing():
        raise NvmlError("the NVIDIA driver is not installed (libnvidia-ml.so.1)")

    monkeypatch.setattr(nvml, "query", missing)
    config = EngineConfig(model="toy", device="cuda", plugins="hardware-cuda")
    with pytest.raises(ConfigError, match=r"--device cuda.*the NVIDIA driver is not installed \(libnvidia-ml"):
        assemble(config, describe_model("toy"), accelerators=list)


class Memory:
    """Stands in for torch.cuda: 100 bytes, of which ``used`` are taken; the allocator keeps ``kept`` of these for nobody."""

    used = kept = 0
    emptied = 0

    def mem_get_info(self, device):
        return 100 - self.used, 100

    def memory_reserved(self, device):
        return self.used

    def memory_allocated(self, device):
        return self.used - self.kept

    def empty_cache(self):
        self.used, self.kept, self.emptied = self.used - self.kept, 0, self.emptied + 1


@pytest.fixture
def memory(monkeypatch):
    import torch

    stand_in = Memory()
    for name in ("mem_get_info", "memory_reserved", "memory_allocated", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    return stand_in


def test_the_kv_pool_gets_what_steps_leave_of_the_share(memory):
    """What the allocator keeps after the largest step is for the next one."""
    cuda = platform.CudaPlatform(PlatformContext())
    memory.used, memory.kept = 40, 15
    assert cuda.kv_memory_bytes(0.9) == 50
    assert cuda.kv_memory_bytes(0.3) == 0
    assert memory.emptied == 0
    assert (cuda.memory_use().free, cuda.memory_use().total, cuda.memory_use().scratch) == (60, 100, 15)


def test_memory_is_counted_by_tag_and_what_loading_left_is_given_back(memory):
    cuda = platform.CudaPlatform(PlatformContext())
    for size in (10, 20):
        with cuda.allocate("weights"):
            memory.used += size
    memory.used += 8
    memory.kept = 8
    cuda.settle("weights", [])
    assert memory.used == 30
    with contextlib.suppress(MemoryError), cuda.allocate("graphs"):
        memory.used += 5
        raise MemoryError
    assert cuda.memory_use().tags == {"weights": 30, "graphs": 5}
    cuda.settle("kv", [])
    assert memory.emptied == 1, "what steps left is kept"


def test_doctor_says_in_a_sentence_that_the_driver_is_missing(monkeypatch):
    def missing():
        raise NvmlError("the NVIDIA driver is not installed")

    monkeypatch.setattr(doctor, "query", missing)
    (finding,) = doctor.findings()
    assert finding.status == "warning"
    assert "driver is not installed" in finding.what
    assert "--device cpu" in finding.advice


def test_doctor_warns_where_triton_would_find_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "query", lambda: [A])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    last = doctor.findings()[-1]
    assert (last.status, last.what.partition(",")[0]) == ("warning", "no C compiler")
    monkeypatch.setenv("CC", "/opt/cc")
    assert "compiler" not in doctor.findings()[-1].what


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

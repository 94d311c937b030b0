"""Conformance suite of platforms.

::

    class TestMine(PlatformSuite):
        spec = PlatformSpec(name="mine", target="my_package.platform:MyPlatform", detect="my_package.platform:detect", device_type="mine")
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import ClassVar

import pytest
import torch

from tokenspeed.interfaces.platform import Platform, PlatformContext
from tokenspeed.plugins.selection import load_target
from tokenspeed.plugins.specs import PlatformSpec

__all__ = ["PlatformSuite"]

_TORCH_FREE = """
import sys
from tokenspeed.interfaces.platform import PlatformContext
from tokenspeed.plugins.selection import load_target
found = load_target({detect!r})()
platform = load_target({target!r})(PlatformContext())
if found is not None:
    platform.capability, platform.defaults, platform.preferences("attention_backend"), platform.supports_graphs, platform.describe()
    platform.default_dtype_name("bfloat16")
assert "torch" not in sys.modules, "torch was imported"
print("yes" if found is not None else "no")
"""


class PlatformSuite:
    """Subclass it, name the ``spec``, and pytest collects the inherited tests. Those that need the device are skipped where ``detect`` finds none."""

    spec: ClassVar[PlatformSpec]

    @pytest.fixture
    def platform(self) -> Platform:
        """The platform of a single rank on this machine."""
        if load_target(self.spec.detect)() is None:
            pytest.skip(f"no {self.spec.device_type} device on this machine")
        made: Platform = load_target(self.spec.target)(PlatformContext())
        return made

    def test_assembly_needs_no_torch(self) -> None:
        """Detection, construction and what assembly reads work in a process that has not imported torch, and leave it so."""
        code = _TORCH_FREE.format(detect=self.spec.detect, target=self.spec.target)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    def test_detection_is_quick_and_says_what_it_found(self) -> None:
        """Detection runs at every start of every command. Measured in processor time: the machine may be busy."""
        detect = load_target(self.spec.detect)
        begun = time.process_time()
        found = detect()
        assert time.process_time() - begun < 2.0
        assert found is None or (isinstance(found, str) and found and "\n" not in found)

    def test_name_and_device(self, platform: Platform) -> None:
        """The object agrees with its spec."""
        assert platform.name == self.spec.name
        assert platform.device.type == torch.device(platform.device).type
        assert "\n" not in platform.describe()

    def test_defaults_are_usable(self, platform: Platform) -> None:
        """Defaults of flags are positive, and the step's budget holds a decode token for every row."""
        defaults = platform.defaults
        assert defaults.max_num_seqs > 0
        assert defaults.page_size > 0
        assert defaults.chunked_prefill_size >= defaults.max_num_seqs

    def test_dtype_by_name_and_by_type_agree(self, platform: Platform) -> None:
        """Assembly decides by name, the engine by type: the same element type."""
        for name in ("float32", "bfloat16", "float16"):
            chosen = platform.default_dtype(getattr(torch, name))
            assert chosen in (torch.float32, torch.bfloat16, torch.float16)
            assert platform.default_dtype_name(name) == str(chosen).removeprefix("torch.")

    def test_preferences_are_names(self, platform: Platform) -> None:
        """An order of names for each kind, empty for kinds it has no opinion on."""
        for kind in ("attention_backend", "attention_backend.decode", "model", "grammar_backend", "no such kind"):
            order = platform.preferences(kind)
            assert len(set(order)) == len(order)
            assert all(isinstance(name, str) and name for name in order)
        assert platform.preferences("no such kind") == ()

    def test_memory_budget(self, platform: Platform) -> None:
        """There is memory for KV, and asking for less of it gives no more."""
        full, half = platform.kv_memory_bytes(0.9), platform.kv_memory_bytes(0.45)
        assert full > 0
        assert half <= full * 1.1  # other processes come and go between the two questions

    def test_allocations_by_tag(self, platform: Platform) -> None:
        """Tensors can be made under each tag, several times, and used afterwards; a platform that counts them counts no more than the device has."""
        for tag in ("weights", "kv", "graphs", "weights"):
            with platform.allocate(tag):
                made = torch.ones(4, device=platform.device)
            platform.synchronize()
            assert made.sum().item() == 4
        use = platform.memory_use()
        if use is not None:
            assert 0 <= use.free <= use.total
            assert 0 <= use.scratch <= use.total
            assert set(use.tags) <= {"weights", "kv", "graphs"}
            assert all(0 <= size <= use.total for size in use.tags.values())

    def test_collective_backend_is_known(self, platform: Platform) -> None:
        """``torch.distributed`` was built with it."""
        assert torch.distributed.is_backend_available(platform.collective_backend())

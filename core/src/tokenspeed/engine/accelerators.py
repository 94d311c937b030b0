"""Whether this machine has an accelerator, told from its device files: needs no driver library and creates no context."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Accelerator", "present_accelerators"]

_DEVICE_FILES = (
    ("cuda", "an NVIDIA GPU", "nvidia[0-9]*"),
    ("rocm", "an AMD GPU", "kfd"),
    ("npu", "an Ascend NPU", "davinci[0-9]*"),
)


@dataclass(frozen=True)
class Accelerator:
    """``plugin`` is the distribution that would serve it."""

    device_type: str
    what: str
    evidence: str

    @property
    def plugin(self) -> str:
        """Distribution of the platform plugin for it."""
        return f"tokenspeed-plugin-hardware-{self.device_type}"


def present_accelerators(dev: Path = Path("/dev")) -> list[Accelerator]:
    """One entry for each kind of accelerator whose device files are in ``dev``."""
    found = []
    for device_type, what, pattern in _DEVICE_FILES:
        files = sorted(dev.glob(pattern))
        if files:
            found.append(Accelerator(device_type, what, str(files[0])))
    return found

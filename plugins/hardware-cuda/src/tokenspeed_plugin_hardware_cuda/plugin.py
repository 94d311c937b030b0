"""Platform ``cuda``."""

from __future__ import annotations

from tokenspeed.plugins import PlatformSpec, Priority, hookimpl
from tokenspeed.plugins.events import DoctorContext, DoctorFinding


@hookimpl
def tokenspeed_platforms() -> list[PlatformSpec]:
    """The one platform of this plugin."""
    return [
        PlatformSpec(
            name="cuda",
            device_type="cuda",
            target="tokenspeed_plugin_hardware_cuda.platform:CudaPlatform",
            detect="tokenspeed_plugin_hardware_cuda.nvml:detect",
            probe="tokenspeed_plugin_hardware_cuda.nvml:absence",
            priority=Priority.SPECIALIZED,
            description="NVIDIA GPUs of compute capability 9.0 and above",
        )
    ]


@hookimpl
def tokenspeed_doctor(context: DoctorContext) -> list[DoctorFinding]:
    """Driver, device and torch build."""
    from tokenspeed_plugin_hardware_cuda.doctor import findings

    return findings()

"""Findings of ``tokenspeed plugins doctor``."""

from __future__ import annotations

import os
import shutil

from tokenspeed.plugins.events import DoctorFinding
from tokenspeed_plugin_hardware_cuda.nvml import MINIMUM, NvmlError, query, visible

__all__ = ["findings"]


def findings() -> list[DoctorFinding]:
    """Driver and devices, whether torch can use them, and the compiler that kernels need."""
    try:
        gpus = query()
    except NvmlError as error:
        return [
            DoctorFinding(
                status="warning", what=str(error), advice="install the NVIDIA driver, or serve with --device cpu"
            )
        ]
    found = []
    seen = visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not seen:
        found.append(
            DoctorFinding(
                status="warning", what=f"none of {len(gpus)} devices is visible", advice="check CUDA_VISIBLE_DEVICES"
            )
        )
    for gpu in seen:
        new_enough = gpu.capability >= MINIMUM
        found.append(
            DoctorFinding(
                status="ok" if new_enough else "warning",
                what=f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, {gpu.memory / 2**30:.0f} GiB",
                advice="" if new_enough else f"needs compute capability {MINIMUM[0]}.{MINIMUM[1]} or above",
            )
        )
    import torch

    if torch.version.cuda is None:
        found.append(
            DoctorFinding(
                status="error",
                what=f"torch {torch.__version__} is built without CUDA",
                advice="install a CUDA build of torch",
            )
        )
    else:
        found.append(DoctorFinding(status="ok", what=f"torch {torch.__version__}, CUDA {torch.version.cuda}"))
    if not (os.environ.get("CC") or any(shutil.which(name) for name in ("cc", "gcc", "clang"))):
        found.append(
            DoctorFinding(
                status="warning",
                what="no C compiler, with which Triton makes what launches its kernels",
                advice="install gcc or clang, or name one with CC",
            )
        )
    return found

"""What the driver says of its devices, through NVML by ctypes: no context, no torch.

NVML numbers devices by bus order and knows nothing of ``CUDA_VISIBLE_DEVICES``; ``visible`` applies it here.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

__all__ = ["Gpu", "NvmlError", "absence", "detect", "query", "visible"]

MINIMUM = (9, 0)


class NvmlError(Exception):
    """The driver's library is missing or refuses to answer; the text is a sentence for the user."""


@dataclass(frozen=True)
class Gpu:
    """One device: ``memory`` is its whole memory in bytes."""

    name: str
    uuid: str
    capability: tuple[int, int]
    memory: int


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise NvmlError(f"the NVIDIA driver is not installed ({error})") from None


def query() -> list[Gpu]:
    """Every device that the driver manages.

    Raises:
        NvmlError: no driver, or the driver does not answer.
    """
    lib = _load()

    def call(name: str, *args: object) -> None:
        code = getattr(lib, name)(*args)
        if code:
            raise NvmlError(
                f"the NVIDIA driver answers {name} with error {code}; is the kernel module loaded (nvidia-smi)?"
            )

    call("nvmlInit_v2")
    try:
        count = ctypes.c_uint()
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
            call("nvmlDeviceGetName", handle, name, ctypes.c_uint(96))
            call("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(96))
            major, minor = ctypes.c_int(), ctypes.c_int()
            call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
            memory = _Memory()
            call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            found.append(Gpu(name.value.decode(), uuid.value.decode(), (major.value, minor.value), memory.total))
        return found
    finally:
        lib.nvmlShutdown()


def visible(gpus: list[Gpu], setting: str | None) -> list[Gpu]:
    """The devices that ``CUDA_VISIBLE_DEVICES`` leaves, in its order: indices or UUID prefixes.

    What follows an unknown entry is dropped, as the driver does.
    """
    if setting is None:
        return gpus
    chosen = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit() and int(entry) < len(gpus):
            chosen.append(gpus[int(entry)])
        elif entry and (matches := [gpu for gpu in gpus if gpu.uuid.startswith(entry)]):
            chosen.append(matches[0])
        else:
            break
    return chosen


def detect() -> str | None:
    """The first usable device in one line, or ``None`` when there is no driver or no device new enough."""
    try:
        gpus = visible(query(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    except NvmlError:
        return None
    usable = [gpu for gpu in gpus if gpu.capability >= MINIMUM]
    if not usable:
        return None
    first = usable[0]
    more = f" and {len(usable) - 1} more" if len(usable) > 1 else ""
    return f"{first.name}, sm_{first.capability[0]}{first.capability[1]}, {first.memory / 2**30:.0f} GiB{more}"


def absence() -> str:
    """Why ``detect`` finds nothing, as a phrase; an empty string where it finds something."""
    try:
        gpus = query()
    except NvmlError as error:
        return str(error)
    seen = visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not seen:
        count = len(gpus)
        return (
            f"none of {count} GPUs is visible (CUDA_VISIBLE_DEVICES)" if count else "the NVIDIA driver manages no GPU"
        )
    if any(gpu.capability >= MINIMUM for gpu in seen):
        return ""
    best = max(seen, key=lambda gpu: gpu.capability)
    here, least = (".".join(map(str, version)) for version in (best.capability, MINIMUM))
    return f"{best.name} has compute capability {here}, and {least} or above is needed"

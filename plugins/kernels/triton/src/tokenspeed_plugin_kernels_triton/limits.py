"""What a device gives to one program, by its capability. Imports neither torch nor Triton."""

from __future__ import annotations

__all__ = ["shared_memory_limit"]

_KIB = 1024
#: NVIDIA, by compute capability: bytes of shared memory that one thread block may ask for (CUDA programming guide, "technical specifications").
_NVIDIA: dict[tuple[int, ...], int] = {
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (11, 0): 227,
    (12, 0): 99,
    (12, 1): 99,
}
#: AMD, by the digits of gfx942 and so on: bytes of local memory of a work group.
_AMD: dict[tuple[int, ...], int] = {(9, 5, 0): 160}
_AMD_OTHERS = 64
#: Of any device that is not listed: what every one since Volta has.
_LEAST = 96


def shared_memory_limit(capability: tuple[int, ...]) -> int:
    """Bytes of shared memory of a program: of compute capability (9, 0), or of gfx942 as (9, 4, 2); a small number for what is unknown."""
    if len(capability) == 3:
        return _AMD.get(capability, _AMD_OTHERS) * _KIB
    return _NVIDIA.get(capability, _LEAST if capability >= (7, 0) else 48) * _KIB

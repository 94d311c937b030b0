"""Readers of flags' values: text in, value out; ``ValueError`` with a phrase that says what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["DTYPES", "INT64_MAX", "KV_DTYPES", "count", "dtype", "held_size", "number", "or_none", "size_in_bytes"]

#: What ``dtype`` reads for ``--dtype``, and for ``--kv-cache-dtype``.
DTYPES = ("auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16", "half", "float")
KV_DTYPES = (*DTYPES, "fp8", "fp8_e4m3")
INT64_MAX = (1 << 63) - 1
_SPELLINGS = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float": "float32",
    "fp8_e4m3": "fp8",
}


def count(minimum: int = 0, maximum: int | None = None) -> Callable[[str], int]:
    """Reads a whole number within bounds; what has no ``maximum`` here is compared with the engine's own range later."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        accepted = "" if maximum is None else f" (accepted: {minimum} to {maximum})"
        if value < minimum:
            raise ValueError(f"{value} is below {minimum}{accepted}")
        if maximum is not None and value > maximum:
            raise ValueError(f"{value} is above {maximum}{accepted}")
        return value

    return read


def number(minimum: float, maximum: float | None = None, *, above: bool = False) -> Callable[[str], float]:
    """Reads a finite number within bounds; ``above`` excludes the lower one."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None
        if not math.isfinite(value):
            raise ValueError(f"{text} is not a finite number")
        if value < minimum or (above and value == minimum):
            raise ValueError(f"{text} must be {'above' if above else 'at least'} {minimum:g}")
        if maximum is not None and value > maximum:
            raise ValueError(f"{text} is above {maximum:g}")
        return value

    return read


def size_in_bytes(text: str) -> int:
    """Reads bytes: ``1073741824`` or ``1G`` (K, M, G, T in powers of 1024)."""
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    digits, shift = (text[:-1], units[text[-1:].upper()]) if text[-1:].upper() in units else (text, 0)
    try:
        return count(1)(digits) << shift
    except ValueError as error:
        at_fault = f"{text!r} is below 1 byte" if digits[:1] == "-" else str(error)
        raise ValueError(f"{at_fault}; write bytes, or a whole number of K, M, G or T, for example 8G") from None


def held_size(text: str) -> int:
    """Reads bytes, as ``size_in_bytes`` does, that 64 bits hold."""
    size = size_in_bytes(text)
    if size > INT64_MAX:
        raise ValueError(f"{text!r} is above {INT64_MAX} bytes")
    return size


def or_none(text: str) -> str | None:
    """Reads a name; ``none`` switches off."""
    return None if text == "none" else text


def dtype(text: str) -> str:
    """Reads a dtype by its long name, its short one (``bf16``), or vLLM's ``half``, ``float`` and ``fp8_e4m3``."""
    return _SPELLINGS.get(text, text)

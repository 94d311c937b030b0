"""Names of element types: long as in ``config.json`` and ``--dtype``, short as in specs."""

from __future__ import annotations

import torch

__all__ = ["dtype_from_name", "short_name"]

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}
_LONG = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,  # of the KV cache alone
}


def short_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``fp32``."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def dtype_from_name(name: str) -> torch.dtype:
    """``float32`` -> ``torch.float32``. Raises ``KeyError`` for a name that is none."""
    return _LONG[name]

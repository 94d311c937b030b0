"""Whether FlashInfer's kernels can be had on this machine: compiled before, or by nvcc. Imports neither torch nor FlashInfer."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path

__all__ = ["lacking", "lacking_latents"]

_DEFAULT_HOME = Path("/usr/local/cuda")


#: How the folders of compiled kernels begin: what reads prompts also serves decodes on the matrix units; latents have kernels of their own.
_HEADS, _LATENTS = "batch_prefill_with_", "batch_mla_attention_"


def lacking() -> str:
    """What is missing to have the kernels for keys and values of heads, as a phrase; an empty string for nothing.

    FlashInfer compiles them on first use with the CUDA toolkit that ``CUDA_HOME`` or ``CUDA_PATH`` names, else with the nvcc on ``PATH``, else with that in
    /usr/local/cuda, and keeps them; the package flashinfer-jit-cache brings them compiled. Which element
    types and head sizes those that were kept are for is not asked: nothing here knows the model's.
    """
    return _lacking(_HEADS)


def lacking_latents() -> str:
    """The same for the kernels that read latents."""
    return _lacking(_LATENTS)


def _lacking(kernels: str) -> str:
    if _finds_nvcc() or importlib.util.find_spec("flashinfer_jit_cache") is not None or _has_compiled(kernels):
        return ""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    where = f"{home} (CUDA_HOME)" if home else f"PATH and {_DEFAULT_HOME}"
    return (
        f"FlashInfer compiles its kernels with nvcc, which is not in {where}: install the CUDA toolkit, or the package flashinfer-jit-cache, which has them "
        "compiled"
    )


def _finds_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return Path(home, "bin", "nvcc").is_file()
    return shutil.which("nvcc") is not None or (_DEFAULT_HOME / "bin" / "nvcc").is_file()


def _has_compiled(kernels: str) -> bool:
    """Whether kernels of the installed version whose names begin so were compiled here before."""
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return False
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    return any((base / ".cache" / "flashinfer" / version).glob(f"*/cached_ops/{kernels}*/*.so"))

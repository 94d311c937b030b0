"""``tokenspeed env``: versions and hardware, for bug reports. Reads metadata and device files; imports no torch."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed import __version__
from tokenspeed.cli.table import columns
from tokenspeed.engine.accelerators import present_accelerators

if TYPE_CHECKING:
    from tokenspeed.plugins.discovery import Discovery

__all__ = ["add_arguments", "run"]

_PACKAGES = (
    "pluggy",
    "torch",
    "triton",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "litestar",
    "uvicorn",
    "msgspec",
    "pyzmq",
    "prometheus-client",
)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what a bug report needs."""
    facts = _facts()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    rows = [(key, str(value)) for key, value in facts.items() if not isinstance(value, (dict, list))]
    rows += [(f"{key} {name}", str(text)) for key in ("packages", "environment") for name, text in facts[key].items()]
    rows += [("accelerator", text) for text in facts["accelerators"]] or [("accelerator", "none")]
    rows += [("plugin", text) for text in facts["plugins"]] or [("plugin", "none")]
    print(columns(("WHAT", "VALUE"), rows))
    return 0


def _facts() -> dict[str, Any]:
    from tokenspeed.plugins.discovery import discover

    found = discover()
    return {
        "tokenspeed": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        "system": platform.platform(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "memory_gib": _memory_gib(),
        "packages": {name: _version(name) for name in dict.fromkeys((*_PACKAGES, *_required(found)))},
        "environment": _environment(),
        "accelerators": [f"{one.what} ({one.evidence})" for one in present_accelerators()],
        "plugins": [f"{one.name} {one.version} ({one.distribution} in {one.location})" for one in found.found],
    }


def _required(found: Discovery) -> list[str]:
    """What plugins say that they need, by the name of the distribution; extras left out."""
    texts = [text for one in found.found for text in importlib.metadata.distribution(one.distribution).requires or ()]
    names = {_NAME.match(text) for text in texts if "extra ==" not in text}
    return sorted({match.group().lower() for match in names if match and not match.group().startswith("tokenspeed-")})


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return 0.0


def _environment() -> dict[str, str]:
    """Variables that change how a server runs, with secrets left out."""
    prefixes = ("TOKENSPEED_", "OMP_", "MKL_", "CUDA_", "NCCL_", "HF_")
    return {
        name: "(set)" if any(word in name for word in _SECRET) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(prefixes)
    }

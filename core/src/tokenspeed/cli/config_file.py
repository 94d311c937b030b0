"""Settings from a file: YAML, JSON or TOML by its suffix. A key that is given twice is refused, as is anything that is not a table of settings."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tokenspeed.errors import ConfigError

__all__ = ["read_config_file"]


def read_config_file(path: Path) -> dict[str, Any]:
    """The settings in ``path``, by key as written.

    Raises:
        ConfigError: no such file, another suffix, or text that does not parse.
    """
    readers = {".yaml": _yaml, ".yml": _yaml, ".json": _json, ".toml": _toml}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"--config {path}: the name must end in {', '.join(readers)}")
    if path.exists() and not path.is_file():  # a device has no end
        raise ConfigError(f"--config {path}: is no regular file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    try:
        settings = reader(text)
    except ValueError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: values are nested too deeply") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ConfigError(f"--config {path}: the file must hold one table of settings by flag name")
    return settings


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    table: dict[Any, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"{key!r} is given twice")
        table[key] = value
    return table


def _json(text: str) -> Any:
    import json

    return json.loads(text, object_pairs_hook=_unique)


def _toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    yaml: Any = importlib.import_module("yaml")
    loader: Any = type("UniqueKeyLoader", (yaml.SafeLoader,), {})

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        loader.flatten_mapping(node)
        return _unique(
            [(loader.construct_object(k, deep=True), loader.construct_object(v, deep=True)) for k, v in node.value]
        )

    loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(text, loader)  # a SafeLoader that refuses a key given twice instead of keeping the last
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None

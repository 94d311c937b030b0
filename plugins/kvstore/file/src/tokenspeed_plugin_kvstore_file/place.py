"""Where the pages are kept, and whether they could be: asked before anything is loaded, without making anything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenspeed.errors import ConfigError

__all__ = ["INCOMING", "check", "root_of", "unwritable"]

#: The folder below the root that pages are written in before they get their name.
INCOMING = "incoming"


def root_of(options: Mapping[str, Any]) -> Path:
    """The directory that the options name, absolute. Raises ``ConfigError`` where they name none."""
    given = str(options.get("directory", ""))
    if not given:
        raise ConfigError("KV store file: give a directory with --set kvstore-file.directory=PATH")
    return Path(given).expanduser().absolute()


def unwritable(root: Path, why: str) -> ConfigError:
    """The error of a directory that pages cannot be written to."""
    return ConfigError(
        f"KV store file: {root} cannot be written ({why}); give another directory with --set kvstore-file.directory=PATH"
    )


def check(options: Mapping[str, Any]) -> None:
    """Refuse options without a directory, and a directory that is none, cannot be made or cannot be written.

    Raises:
        ConfigError: with what to give instead.
    """
    root = root_of(options)
    there = next(path for path in (root / INCOMING, root, *root.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise unwritable(root, f"{there} is not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise unwritable(root, f"{there}: permission denied")

"""The two decorators of the plugin contract: ``hookspec`` (core) and ``hookimpl`` (plugins)."""

from __future__ import annotations

import pluggy

__all__ = ["ENTRY_POINT_GROUP", "PROJECT", "hookimpl", "hookspec"]

PROJECT = "tokenspeed"
ENTRY_POINT_GROUP = "tokenspeed.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

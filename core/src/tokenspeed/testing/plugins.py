"""Throwaway plugin distributions: a folder of ``.dist-info`` and modules that discovery cannot tell from installed ones.

Use it as a context manager, so that the folder is on ``sys.path`` inside the block and nothing of it stays imported afterwards::

    with PluginFolder(tmp_path) as folder:
        folder.add("acme", "from tokenspeed.plugins import hookimpl ...")
        host = folder.load("+acme")
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenspeed.plugins.discovery import Discovery, discover
from tokenspeed.plugins.first_party import FIRST_PARTY
from tokenspeed.plugins.manager import PluginHost
from tokenspeed.plugins.markers import ENTRY_POINT_GROUP

__all__ = ["PluginFolder"]

_IMPORTS = """\
from tokenspeed.plugins import *
from tokenspeed.plugins.events import *
"""


class PluginFolder:
    """A folder that plays a site-packages directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._modules: set[str] = set()
        self._first_party: set[str] = set()

    def __enter__(self) -> PluginFolder:
        sys.path.insert(0, str(self.path))
        importlib.invalidate_caches()
        return self

    def __exit__(self, *_: object) -> None:
        sys.path.remove(str(self.path))
        for name in list(sys.modules):
            if name.partition(".")[0] in self._modules:
                del sys.modules[name]
        importlib.invalidate_caches()

    def add(
        self,
        name: str,
        source: str,
        *,
        distribution: str | None = None,
        version: str = "1.0",
        module: str | None = None,
        modules: Mapping[str, str] | None = None,
        first_party: bool = False,
    ) -> str:
        """Write a distribution with one plugin.

        Args:
            name: the plugin's (entry point's) name.
            source: text of its module, dedented; ``tokenspeed.plugins`` and the event contexts are imported before it.
            distribution: its distribution; ``dist-NAME`` unless given.
            module: the module's name; ``NAME_plugin`` with underscores unless given.
            modules: further top-level modules, by name, for targets.
            first_party: ``discover`` treats the distribution as one of this repository.

        Returns:
            The module's name.
        """
        distribution = distribution or f"dist-{name}"
        module = module or f"{name.replace('-', '_')}_plugin"
        self.write_module(module, _IMPORTS + textwrap.dedent(source))
        for other, text in (modules or {}).items():
            self.write_module(other, textwrap.dedent(text))
        self.write_metadata(distribution, version, {name: module})
        if first_party:
            self._first_party.add(distribution)
        return module

    def write_module(self, name: str, text: str) -> None:
        """One module, importable while the folder is on the path."""
        self._modules.add(name)
        (self.path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    def write_metadata(self, distribution: str, version: str, points: Mapping[str, str]) -> None:
        """The ``.dist-info`` alone, as a stale copy or a broken installation leaves it."""
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{lines}")

    def discover(self) -> Discovery:
        """What discovery finds in this folder alone."""
        return discover([str(self.path)], first_party=FIRST_PARTY | self._first_party)

    def load(self, plugins: str = "", **arguments: Any) -> PluginHost:
        """``PluginHost.load`` over this folder alone."""
        return PluginHost.load(plugins, discovery=self.discover(), **arguments)

"""Runs in a process of its own: loads one plugin as if it were the only one installed, and prints what came of it as JSON.

``python alone.py METADATA_FOLDER SOURCE_FOLDER PLUGIN``
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class Others(importlib.abc.MetaPathFinder):
    """Refuses to import any other plugin's package."""

    def __init__(self, allowed: str) -> None:
        self._allowed = allowed

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if top.startswith("tokenspeed_plugin_") and top != self._allowed:
            raise ModuleNotFoundError(f"{name} is another plugin", name=name)
        return None


def main(metadata: str, source: str, plugin: str) -> dict[str, object]:
    package = f"tokenspeed_plugin_{plugin.replace('-', '_')}"
    sys.meta_path.insert(0, Others(package))
    if importlib.util.find_spec(package) is None:
        sys.path.insert(0, source)
    from tokenspeed.plugins.discovery import discover
    from tokenspeed.plugins.manager import PluginHost
    from tokenspeed.plugins.requirements import missing_requirements
    from tokenspeed.plugins.selection import load_target
    from tokenspeed.plugins.specs import Spec

    host = PluginHost.load(plugin, discovery=discover([metadata]))
    record = host.record(plugin)
    heavy = sorted({"torch", "transformers", "triton"} & set(sys.modules))
    loaded, left = [], []
    for contribution in record.contributions:
        spec = contribution.spec
        if not isinstance(spec, Spec):
            continue
        elsewhere = spec.platforms and "cpu" not in spec.platforms
        missing = missing_requirements(spec.requires)
        if elsewhere or missing:
            left.append(spec.target)
            continue
        load_target(spec.target)
        loaded.append(spec.target)
    return {
        "status": record.status,
        "cause": record.cause,
        "heavy": heavy,
        "contributions": len(record.contributions),
        "loaded": loaded,
        "left": left,
        "off": [c.off for c in record.contributions if c.off],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

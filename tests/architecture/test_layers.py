"""Who may import whom. ``lint-imports`` checks core by its whole import graph; these tests check what it cannot see: plugins and C++."""

from __future__ import annotations

import re
from typing import Any

import pytest

PLUGINS_MAY_USE = ("plugins", "interfaces", "layers", "weights", "types", "errors")
# Lower layers first: a file includes headers of its own layer and of those before it.
CPP_LAYERS = ("support", "cache", "scheduler", "bindings")


def test_a_plugin_sees_the_contract_and_no_other_plugin(repo: Any) -> None:
    found = []
    for plugin in repo.plugins:
        for path in repo.matching(".py", under=f"{plugin.path}/src"):
            for name in sorted(repo.imports(path)):
                top, _, rest = name.partition(".")
                foreign = top.startswith("tokenspeed_plugin_") and top != plugin.package
                internal = top == "tokenspeed" and rest and rest.split(".")[0] not in PLUGINS_MAY_USE
                if foreign or internal:
                    found.append(f"{repo.relative(path)}: {name}")
    assert found == []


def test_tests_of_a_plugin_use_the_contract_and_the_conformance_kit(repo: Any) -> None:
    found = []
    for plugin in repo.plugins:
        for path in repo.matching(".py", under=f"{plugin.path}/tests"):
            others = {
                n
                for n in repo.imports(path)
                if n.startswith("tokenspeed_plugin_") and n.split(".")[0] != plugin.package
            }
            upper = {n for n in repo.imports(path) if re.match(r"tokenspeed\.(serving|cli)\b", n)}
            found += [f"{repo.relative(path)}: {name}" for name in sorted(others | upper)]
    assert found == []


@pytest.mark.parametrize("layer", CPP_LAYERS)
def test_cpp_layers_include_downwards_only(repo: Any, layer: str) -> None:
    """bindings -> scheduler -> cache -> support; only bindings knows Python; nothing knows torch."""
    below = CPP_LAYERS[: CPP_LAYERS.index(layer) + 1]
    files = repo.matching(".cc", ".cpp", ".h", ".hpp", under=f"core/csrc/{layer}")
    assert files
    found = []
    for path in files:
        for header in re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), flags=re.MULTILINE):
            top = header.split("/")[0]
            upward = top in CPP_LAYERS and top not in below
            python = layer != "bindings" and (header == "Python.h" or top in ("pybind11", "numpy"))
            if upward or python or top in ("torch", "ATen", "c10"):
                found.append(f"{repo.relative(path)}: {header}")
    assert found == []


def test_no_hook_is_called_by_the_step_loop(repo: Any) -> None:
    """A pluggy call costs microseconds: ``.hook.`` appears only where a process assembles, starts or ends."""
    allowed = (
        "core/src/tokenspeed/plugins/",
        "core/src/tokenspeed/engine/assembly",
        "core/src/tokenspeed/engine/bootstrap",
        "core/src/tokenspeed/cli/",
    )
    found = [
        repo.relative(path)
        for path in repo.sources
        if re.search(r"\.hook\.\w+\(", path.read_text()) and not repo.relative(path).startswith(allowed)
    ]
    assert found == []

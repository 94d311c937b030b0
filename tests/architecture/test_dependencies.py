"""What shipped code imports, its distribution declares: a developer's environment hides a missing dependency, a fresh one does not."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

#: Comes with tokenspeed-core, on which every plugin depends.
WITH_CORE = {"tokenspeed-core", "torch", "numpy"}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[ <>=!\[;~]", name)[0]).lower()


def projects(root: Path) -> list[Path]:
    return [
        root / "core",
        *sorted(path.parent for path in (root / "plugins").glob("**/pyproject.toml") if "build" not in path.parts),
    ]


@pytest.mark.parametrize("folder", projects(Path(__file__).resolve().parents[2]), ids=lambda folder: folder.name)
def test_third_party_imports_are_declared(repo: Any, folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    optional = [need for group in project.get("optional-dependencies", {}).values() for need in group]
    declared = (
        {normalised(need) for need in [*project.get("dependencies", ()), *optional]}
        | WITH_CORE
        | {normalised(project["name"])}
    )
    owners = importlib.metadata.packages_distributions()
    missing = {}
    for path in repo.matching(".py", under=f"{repo.relative(folder)}/src"):
        for top in {name.split(".")[0] for name in repo.imports(path)} - set(sys.stdlib_module_names):
            distributions = {normalised(name) for name in owners.get(top, [top])}
            # An optional package that is not installed here is known by its import name alone: flashinfer comes from flashinfer-python.
            prefixed = any(need.startswith(f"{normalised(top)}-") for need in declared)
            if not distributions & declared and not prefixed:
                missing[top] = repo.relative(path)
    assert missing == {}

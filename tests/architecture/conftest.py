"""The checkout as the architecture tests see it: tracked folders, plugin folders, parsed modules."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Plugin:
    """A folder under ``plugins/`` that holds a ``pyproject.toml``."""

    folder: Path

    @property
    def path(self) -> str:
        return self.folder.relative_to(ROOT).as_posix()

    @property
    def name(self) -> str:
        """Plugin name by the naming table: the folder's path below ``plugins/`` with dashes."""
        return self.path.removeprefix("plugins/").replace("/", "-").replace("_", "-")

    @property
    def distribution(self) -> str:
        return f"tokenspeed-plugin-{self.name}"

    @property
    def package(self) -> str:
        return self.distribution.replace("-", "_")

    @property
    def project(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]


class Repo:
    """Files of the checkout that git tracks or would track."""

    root = ROOT

    @cached_property
    def files(self) -> list[Path]:
        listing = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        return [ROOT / line for line in sorted(set(listing.stdout.splitlines())) if (ROOT / line).is_file()]

    def matching(self, *suffixes: str, under: str = "") -> list[Path]:
        base = ROOT / under
        return [path for path in self.files if path.suffix in suffixes and path.is_relative_to(base)]

    @cached_property
    def sources(self) -> list[Path]:
        """Python that is shipped: core and every plugin, without tests."""
        return [
            path
            for path in self.matching(".py")
            if "src" in path.relative_to(ROOT).parts and "tests" not in path.relative_to(ROOT).parts
        ]

    @cached_property
    def tests(self) -> list[Path]:
        return [path for path in self.matching(".py") if "tests" in path.relative_to(ROOT).parts]

    @cached_property
    def plugins(self) -> list[Plugin]:
        return [
            Plugin(path.parent) for path in self.matching(".toml", under="plugins") if path.name == "pyproject.toml"
        ]

    def relative(self, path: Path) -> str:
        return path.relative_to(ROOT).as_posix()

    def imports(self, path: Path, *, at_import: bool = False) -> set[str]:
        """Absolute names of modules that ``path`` imports when it runs (not ``if TYPE_CHECKING``); ``at_import``: outside functions."""
        tree = ast.parse(path.read_text(), filename=str(path))
        if at_import:
            tree.body = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                node.body = []
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        return found


@pytest.fixture(scope="session")
def repo() -> Repo:
    return Repo()

"""Every folder under ``plugins/`` is whole by itself and follows the naming table."""

from __future__ import annotations

import ast
import re
from typing import Any

HEAVY = {
    "torch",
    "transformers",
    "triton",
    "numpy",
    "safetensors",
    "gguf",
    "flashinfer",
    "xgrammar",
    "tokenspeed_scheduler",
}


def test_names_follow_the_folder(repo: Any) -> None:
    wrong = {}
    assert repo.plugins
    for plugin in repo.plugins:
        entry_points = plugin.project.get("entry-points", {})
        expected = {"tokenspeed.plugins": {plugin.name: f"{plugin.package}.plugin"}}
        if plugin.project["name"] != plugin.distribution or entry_points != expected:
            wrong[plugin.path] = (plugin.project["name"], entry_points)
        if not (plugin.folder / "src" / plugin.package / "plugin.py").is_file():
            wrong[plugin.path] = f"no src/{plugin.package}/plugin.py"
    assert wrong == {}


def test_a_folder_holds_readme_tests_and_metadata(repo: Any) -> None:
    missing = []
    for plugin in repo.plugins:
        if not (plugin.folder / "README.md").is_file():
            missing.append(f"{plugin.path}/README.md")
        if not any(path.name.startswith("test_") for path in repo.matching(".py", under=f"{plugin.path}/tests")):
            missing.append(f"{plugin.path}/tests/test_*.py")
        project = plugin.project
        missing += [
            f"{plugin.path}/pyproject.toml: {key}"
            for key in ("description", "requires-python", "dependencies")
            if not project.get(key)
        ]
        if not any(re.match(r"tokenspeed-core\b", need) for need in project.get("dependencies", ())):
            missing.append(f"{plugin.path}/pyproject.toml: a dependency on tokenspeed-core")
        if any(re.match(r"tokenspeed\s*([<>=!~\[;]|$)", need) for need in project.get("dependencies", ())):
            missing.append(
                f"{plugin.path}/pyproject.toml: depends on the distribution 'tokenspeed', which is another project's"
            )
    assert missing == []


def test_registering_imports_nothing_heavy(repo: Any) -> None:
    """``plugin.py`` names its targets by string, so that ``plugins list`` stays fast with every plugin installed."""
    heavy = []
    for plugin in repo.plugins:
        module = plugin.folder / "src" / plugin.package / "plugin.py"
        names = {name.split(".")[0] for name in repo.imports(module, at_import=True)}
        own = {name for name in repo.imports(module, at_import=True) if name.split(".")[0] == plugin.package}
        heavy += [f"{repo.relative(module)}: {name}" for name in sorted((names & HEAVY) | own)]
        package_init = ast.parse((module.parent / "__init__.py").read_text())
        if any(
            isinstance(node, (ast.Import, ast.ImportFrom)) and "__future__" not in ast.unparse(node)
            for node in package_init.body
        ):
            heavy.append(
                f"{repo.relative(module.parent / '__init__.py')}: imports at package level run before plugin.py"
            )
    assert heavy == []


def test_the_readme_lists_every_plugin(repo: Any) -> None:
    text = (repo.root / "README.md").read_text()
    assert [
        plugin.path for plugin in repo.plugins if f"]({plugin.path})" not in text and f"]({plugin.path}/)" not in text
    ] == []

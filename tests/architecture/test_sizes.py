"""Files stay small enough to be read in one go."""

from __future__ import annotations

import statistics
from typing import Any

import pytest


def lines(path: Any) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.parametrize(
    ("suffixes", "limit", "median"),
    [((".py",), 420, 200), ((".cc", ".cpp", ".h", ".hpp"), 630, 300)],
    ids=["python", "c++"],
)
def test_no_source_file_outgrows_its_room(repo: Any, suffixes: tuple[str, ...], limit: int, median: int) -> None:
    sizes = {repo.relative(path): lines(path) for path in repo.matching(*suffixes)}
    shipped = {path: size for path, size in sizes.items() if "/tests/" not in f"/{path}"}
    assert shipped
    assert {path: size for path, size in shipped.items() if size > limit} == {}
    assert statistics.median(shipped.values()) <= median


def test_a_plugin_module_is_a_short_list_of_specs(repo: Any) -> None:
    """``plugin.py`` holds hook implementations and nothing else, in about 40 lines for one kind of contribution."""
    long = {}
    for plugin in repo.plugins:
        module = plugin.folder / "src" / plugin.package / "plugin.py"
        if module.exists() and lines(module) > 60:
            long[repo.relative(module)] = lines(module)
    assert long == {}

"""Documents name things that exist: modules and attributes, files, hooks, make targets, flags."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/tour.md",
    "docs/glossary.md",
    "docs/gpu.md",
    "docs/models.md",
    "benchmarks/README.md",
)
NAME = re.compile(r"`(tokenspeed(?:\.\w+)+)(?::(\w+)(?:\.(\w+))?)?`")
FILE = re.compile(r"`((?:core|plugins|tests|docs|examples|benchmarks)/[\w./-]+)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)[^)]*\)")


def module_file(root: Path, dotted: str) -> Path | None:
    base = root / "core" / "src" / Path(*dotted.split("."))
    return next(
        (path for path in (base.with_suffix(".py"), base.with_suffix(".pyi"), base / "__init__.py") if path.is_file()),
        None,
    )


def members(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Names that a module or class body binds."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def exists(root: Path, dotted: str, name: str | None, attribute: str | None) -> bool:
    path = module_file(root, dotted)
    if path is None:
        parent, _, last = dotted.rpartition(".")
        return name is None and bool(parent) and parent != "tokenspeed" and exists(root, parent, last, None)
    if name is None:
        return True
    found = members(ast.parse(path.read_text()).body)
    owner = found.get(name)
    if owner is None or attribute is None:
        return owner is not None
    return isinstance(owner, ast.ClassDef) and attribute in members(owner.body)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_in_documents_exist(repo: Any, document: str) -> None:
    text = (repo.root / document).read_text()
    assert [match.group(0) for match in NAME.finditer(text) if not exists(repo.root, *match.groups())] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_in_documents_exist(repo: Any, document: str) -> None:
    path = repo.root / document
    text = path.read_text()
    files = [name for name in FILE.findall(text) if "..." not in name and not (repo.root / name).exists()]
    files += [link for link in LINK.findall(text) if not (path.parent / link).exists()]
    # A plugin folder that an example invents is no file of the checkout.
    assert [name for name in files if not name.endswith("/foo")] == []


def test_the_tour_has_about_twelve_places(repo: Any) -> None:
    places = re.findall(r"^\d+\. ", (repo.root / "docs/tour.md").read_text(), flags=re.MULTILINE)
    assert 10 <= len(places) <= 14


def test_every_glossary_row_says_where(repo: Any) -> None:
    rows = [
        line
        for line in (repo.root / "docs/glossary.md").read_text().splitlines()
        if line.startswith("| ") and "---" not in line
    ]
    terms = [row for row in rows if not row.startswith("| name |")]
    assert len(terms) > 40
    assert [row for row in terms if not re.search(r"\| `[^`]+` \|$", row)] == []
    names = [row.split("|")[1].strip() for row in terms]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/acceptance/foundation.md"])
def test_make_targets_in_documents_exist(repo: Any, document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (repo.root / "Makefile").read_text(), flags=re.MULTILINE))
    used = {
        word
        for line in re.findall(
            r"^make ([a-z -]+?)(?: +[#&].*)?$", (repo.root / document).read_text(), flags=re.MULTILINE
        )
        for word in line.split()
    }
    assert used - targets == set()


def test_make_help_describes_every_task(repo: Any) -> None:
    text = (repo.root / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", text, flags=re.MULTILINE)
    assert phony is not None
    described = set(re.findall(r"^([a-z-]+):.*## .+", text, flags=re.MULTILINE))
    assert set(phony.group(1).split()) == described

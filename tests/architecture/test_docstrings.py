"""Public methods say what they do, themselves or through the contract that they implement."""

from __future__ import annotations

import ast
from typing import Any


def _undocumented(tree: ast.Module) -> list[tuple[str, str, list[str]]]:
    """(class, method, base names) of public methods without a docstring of their own."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
            for item in node.body:
                if (
                    isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))
                    and not item.name.startswith("_")
                    and not ast.get_docstring(item)
                ):
                    found.append((node.name, item.name, bases))
    return found


def test_public_methods_have_a_docstring_or_inherit_one(repo: Any) -> None:
    """Inheritance is followed by name through the shipped sources; methods of outside bases (``nn.Module.forward``) inherit their library's text."""
    trees = {path: ast.parse(path.read_text()) for path in repo.sources}
    classes: dict[str, ast.ClassDef] = {
        n.name: n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)
    }

    def inherits(bases: list[str], method: str, seen: frozenset[str] = frozenset()) -> bool:
        for base in bases:
            if base in seen or base in ("object", "Protocol", "Generic", "ABC"):
                continue
            if base not in classes:
                return True
            node = classes[base]
            own = next(
                (i for i in node.body if isinstance(i, (ast.FunctionDef, ast.AsyncFunctionDef)) and i.name == method),
                None,
            )
            if own is not None and ast.get_docstring(own):
                return True
            if inherits([ast.unparse(b).split("[")[0].split(".")[-1] for b in node.bases], method, seen | {base}):
                return True
        return False

    missing = [
        f"{repo.relative(path)}: {owner}.{method}"
        for path, tree in trees.items()
        for owner, method, bases in _undocumented(tree)
        if not inherits(bases, method)
    ]
    assert missing == []

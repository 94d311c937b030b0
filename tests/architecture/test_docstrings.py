"""Public methods say what they do, themselves or through the contract that they implement."""

from __future__ import annotations

import ast
import re
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _bases(node: ast.ClassDef, module: str = "") -> list[str]:
    """Names of base classes, and of contracts that the class's or module's docstring names (a ``Protocol`` is implemented without inheriting)."""
    return [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases] + re.findall(
        r"``(?:\w+\.)*([A-Z]\w+)``", module + (ast.get_docstring(node) or "")
    )


def _exempt(owner: ast.ClassDef, method: Function) -> bool:
    """Overloads share one docstring; a protocol's attributes stand in its class's; ``on_STATE`` handlers are described by their state machine."""
    decorators = {ast.unparse(d) for d in method.decorator_list}
    attribute = "property" in decorators and any(ast.unparse(base) == "Protocol" for base in owner.bases)
    return "overload" in decorators or attribute or method.name.startswith("on_")


def test_public_methods_have_a_docstring_or_inherit_one(repo: Any) -> None:
    """Inheritance is followed by name through the shipped sources; methods of outside bases (``nn.Module.forward``) inherit their library's text."""
    trees = {path: ast.parse(path.read_text()) for path in repo.sources}
    classes: dict[str, ast.ClassDef] = {
        n.name: n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)
    }

    def inherits(node: ast.ClassDef, method: str, seen: frozenset[str] = frozenset(), module: str = "") -> bool:
        for base in _bases(node, module):
            if base in seen or base in ("object", "Protocol", "Generic", "ABC", node.name):
                continue
            if base not in classes:
                if base in {ast.unparse(b).split("[")[0].split(".")[-1] for b in node.bases}:
                    return True
                continue
            above = classes[base]
            own = next((i for i in above.body if isinstance(i, Function) and i.name == method), None)
            if (own is not None and ast.get_docstring(own)) or inherits(above, method, seen | {base}):
                return True
        return False

    missing = [
        f"{repo.relative(path)}: {owner.name}.{item.name}"
        for path, tree in trees.items()
        for owner in tree.body
        if isinstance(owner, ast.ClassDef) and not owner.name.startswith("_")
        for item in owner.body
        if isinstance(item, Function) and not item.name.startswith("_") and not ast.get_docstring(item)
        if not _exempt(owner, item) and not inherits(owner, item.name, module=ast.get_docstring(tree) or "")
    ]
    assert missing == []

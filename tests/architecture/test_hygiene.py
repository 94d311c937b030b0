"""Habits that hold everywhere in shipped code."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

# On the path of a message from one process to the other.
MESSAGE_PATHS = (
    "core/src/tokenspeed/messages",
    "core/src/tokenspeed/serving",
    "core/src/tokenspeed/engine",
    "core/src/tokenspeed/runtime",
)
UNSAFE_CALLS = {
    "recv_pyobj",
    "send_pyobj",
    "broadcast_object_list",
    "all_gather_object",
    "send_object_list",
    "scatter_object_list",
}


def test_no_pickle_between_processes(repo: Any) -> None:
    """Messages are MessagePack by schema: neither ``pickle`` nor a call that pickles behind one's back stands on their way."""
    found = []
    for path in repo.sources:
        if not repo.relative(path).startswith(MESSAGE_PATHS):
            continue
        bad = repo.imports(path) & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
        text = path.read_text()
        bad |= {call for call in UNSAFE_CALLS if re.search(rf"\b{call}\b", text)}
        found += [f"{repo.relative(path)}: {name}" for name in sorted(bad)]
    assert found == []


def test_shipped_code_does_not_ask_whether_a_test_runs(repo: Any) -> None:
    asking = [
        repo.relative(path)
        for path in repo.sources
        if "/testing/" not in repo.relative(path) and re.search(r"PYTEST|\bpytest\b|unittest", path.read_text())
    ]
    assert asking == []


def test_no_module_rebinds_its_globals(repo: Any) -> None:
    """State belongs to objects: a ``global`` statement would make it the process's."""
    found = []
    for path in repo.sources:
        tree = ast.parse(path.read_text())
        found += [f"{repo.relative(path)}:{node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert found == []


def test_nothing_is_left_for_later_in_a_comment(repo: Any) -> None:
    marker = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [
        f"{repo.relative(path)}:{number}"
        for path in [*repo.sources, *repo.matching(".cc", ".cpp", ".h", ".hpp")]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marker.search(line)
    ]
    assert found == []


def test_every_skip_says_why(repo: Any) -> None:
    bare = []
    for path in repo.tests:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, (ast.Attribute, ast.Call)):
                continue
            call = node if isinstance(node, ast.Call) else None
            name = ast.unparse(call.func if call else node)
            if name in ("pytest.mark.skip", "pytest.mark.xfail", "pytest.mark.skipif") and call is not None:
                reasons = [k for k in call.keywords if k.arg == "reason"]
                if not reasons and not (name != "pytest.mark.skipif" and call.args):
                    bare.append(f"{repo.relative(path)}:{node.lineno}")
            elif name == "pytest.skip" and call is not None and not (call.args or call.keywords):
                bare.append(f"{repo.relative(path)}:{node.lineno}")
    assert bare == []


@pytest.mark.parametrize(
    "pattern", [r"/(home|Users|root|work)/\w+", r"\bhttps?://(10|172|192)\.\d+\.", r"(?i)co-authored-by"]
)
def test_nothing_names_one_particular_machine(repo: Any, pattern: str) -> None:
    found = []
    for path in repo.files:
        if (
            path.suffix in (".py", ".toml", ".md", ".txt", ".cc", ".cpp", ".h", ".yaml", ".json", "")
            and path != repo.root / "tests/architecture/test_hygiene.py"
        ):
            text = path.read_text(errors="replace")
            found += [f"{repo.relative(path)}: {match.group(0)}" for match in re.finditer(pattern, text)]
    assert found == []


def test_public_modules_say_what_they_export(repo: Any) -> None:
    """Every module of core and plugins that defines public names lists them in ``__all__`` (hook modules have no callers and need none)."""
    missing = []
    for path in repo.sources:
        if path.name in ("plugin.py", "hookspecs.py", "__main__.py", "conftest.py") or (
            path.name.startswith("_") and path.name != "__init__.py"
        ):
            continue
        tree = ast.parse(path.read_text())
        public = [
            n.name
            for n in tree.body
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and n.name[0] != "_"
        ]
        exported = any(
            isinstance(n, (ast.Assign, ast.AnnAssign)) and "__all__" in ast.unparse(n).split("=")[0] for n in tree.body
        )
        if public and not exported:
            missing.append(repo.relative(path))
    assert missing == []

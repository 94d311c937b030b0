"""The index of reported faults is complete and points at tests that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "cases.toml").read_text())

# How many reports of each area the index restates: a case that is dropped by accident is noticed.
AREAS = {"api": 17, "tool": 17, "reason": 6, "gram": 10, "kv": 16, "ops": 14, "plug": 5}


def test_every_report_is_listed() -> None:
    assert Counter(case.rpartition("-")[0] for case in INDEX) == AREAS


@pytest.mark.parametrize("case", INDEX)
def test_a_case_has_a_fault_and_a_test_or_a_reason(case: str) -> None:
    entry = INDEX[case]
    assert entry["fault"].endswith(".")
    assert bool(entry.get("tests")) != bool(entry.get("later")), (
        "name its tests, or what has to exist before it applies"
    )
    assert set(entry) <= {"fault", "tests", "later"}


@pytest.mark.parametrize("case", [case for case, entry in INDEX.items() if entry.get("tests")])
def test_the_named_tests_exist(case: str) -> None:
    """``file::function`` for Python, ``file::Suite.Name`` for C++."""
    for test in INDEX[case]["tests"]:
        file, _, name = test.partition("::")
        path = ROOT / file
        assert path.is_file(), test
        if path.suffix == ".py":
            tree = ast.parse(path.read_text())
            names = {
                n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            }
            assert name.rpartition("::")[2] in names, test
        else:
            suite, _, member = name.partition(".")
            assert re.search(rf"TEST\w*\(\s*{suite}\s*,\s*{member}\s*\)", path.read_text()), test

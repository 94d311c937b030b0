"""Every hook is documented, explained in ``docs/hooks.md``, and exercised by a test."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest

from tokenspeed.plugins import hookspecs

HOOKS = sorted(
    name
    for name, value in vars(hookspecs).items()
    if name.startswith("tokenspeed_") and isinstance(value, types.FunctionType)
)


def test_there_are_hooks() -> None:
    assert "tokenspeed_models" in HOOKS


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_is_documented(repo: Any, hook: str) -> None:
    assert inspect.getdoc(getattr(hookspecs, hook))
    assert f"`{hook}" in (repo.root / "docs" / "hooks.md").read_text(), "run `make docs`"


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_is_tested(repo: Any, hook: str) -> None:
    """A hook that nothing exercises may be broken without anyone noticing: some test outside this folder implements or calls it."""
    here = repo.root / "tests" / "architecture"
    users = [path for path in repo.tests if not path.is_relative_to(here) and hook in path.read_text()]
    assert users


@pytest.mark.parametrize("hook", HOOKS)
def test_event_hooks_take_one_context(hook: str) -> None:
    """Registration hooks take nothing, event hooks take one context object that can grow."""
    assert list(inspect.signature(getattr(hookspecs, hook)).parameters) in ([], ["context"])

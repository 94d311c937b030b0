"""``docs/hooks.md`` says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenspeed.cli.hooks_doc import main, render
from tokenspeed.plugins import hookspecs, specs
from tokenspeed.plugins.registry import REGISTRATION_HOOKS

PAGE = Path(__file__).resolve().parents[4] / "docs" / "hooks.md"


def test_every_hook_and_every_field_is_on_the_page(tmp_path: Path) -> None:
    main([str(tmp_path / "docs" / "hooks.md")])
    text = (tmp_path / "docs" / "hooks.md").read_text()
    for hook in (name for name in vars(hookspecs) if name.startswith("tokenspeed_")):
        assert f"### `{hook}(" in text
    for cls in (specs.Spec, specs.AttentionSupport, *REGISTRATION_HOOKS.values()):
        for field in cls.__annotations__:
            assert f"| `{field}` |" in text or field in ("KIND", "API")
    assert "``" not in text.replace("```", "")


def test_the_committed_page_is_up_to_date() -> None:
    if not PAGE.parent.is_dir():
        pytest.skip("the tests were taken out of the repository")
    assert PAGE.read_text() == render(), "run `make docs`"

"""Whether required packages are installed, from metadata alone."""

from __future__ import annotations

import pytest

from tokenspeed.plugins.requirements import missing_requirements


@pytest.mark.parametrize(
    "text", ["pluggy", "pluggy>=1.0", "Pluggy[x]>=1", "absent-package; python_version < '3'", "import:pluggy of x"]
)
def test_met(text: str) -> None:
    assert missing_requirements([text]) == []


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("absent-package>=2", "requires absent-package>=2 (not installed)"),
        ("pluggy<1", "is installed)"),
        ("not a requirement!", "malformed"),
        ("import:module_nobody_has", "requires the module module_nobody_has (not installed)"),
        ("import:module_nobody_has of a or b", "requires the module module_nobody_has of a or b (not installed)"),
        ("import:a.b", "malformed"),
    ],
)
def test_missing(text: str, phrase: str) -> None:
    (found,) = missing_requirements([text, "pluggy"])
    assert phrase in found

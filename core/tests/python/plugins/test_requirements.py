"""Whether required packages are installed, from metadata alone."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

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


@pytest.mark.parametrize("installed", ["1.2", "1.2.0", "1.10", "1.2.1", "2", "1.1.9", "1.2rc1", "1.2.post1", "1.2+cpu"])
@pytest.mark.parametrize("relation", ["a-package>=1.2", "a-package==1.2", "a-package>=1.2.0", "a-package==1"])
def test_plain_versions_are_compared_as_packaging_does(
    installed: str, relation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: installed)
    met = Requirement(relation).specifier.contains(installed, prereleases=True)
    assert missing_requirements([relation]) == ([] if met else [f"requires {relation} ({installed} is installed)"])

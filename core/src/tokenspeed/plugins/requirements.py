"""Whether the packages that a contribution asks for are installed, without importing them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

__all__ = ["missing_requirements"]


def missing_requirements(requires: Iterable[str]) -> list[str]:
    """A phrase for each PEP 508 requirement that does not hold here, for example ``requires flashinfer-python>=0.6 (0.5.2 is installed)``."""
    requirements = list(requires)
    if not requirements:
        return []
    from packaging.requirements import InvalidRequirement, Requirement  # 30 ms that most starts do not need

    missing = []
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            missing.append(f"states the requirement {text!r}, which is malformed ({str(error).splitlines()[0]})")
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"requires {text} (not installed)")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"requires {text} ({version} is installed)")
    return missing

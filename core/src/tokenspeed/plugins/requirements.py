"""Whether the packages that a contribution asks for are installed, without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable

__all__ = ["missing_requirements"]

_MODULE = re.compile(r"import:([A-Za-z_]\w*)(?: of (.+))?")


def missing_requirements(requires: Iterable[str]) -> list[str]:
    """A phrase for each requirement that does not hold here, for example ``requires flashinfer-python>=0.6 (0.5.2 is installed)``.

    A requirement is a PEP 508 text, or ``import:MODULE of DISTRIBUTIONS`` for a top-level module that any of several distributions brings.
    """
    missing, requirements = [], []
    for text in requires:
        if (wanted := _MODULE.fullmatch(text)) is None:
            requirements.append(text)
        elif importlib.util.find_spec(wanted[1]) is None:
            origin = f" of {wanted[2]}" if wanted[2] else ""
            missing.append(f"requires the module {wanted[1]}{origin} (not installed)")
    if not requirements:
        return missing
    from packaging.requirements import InvalidRequirement, Requirement  # 30 ms that most starts do not need

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

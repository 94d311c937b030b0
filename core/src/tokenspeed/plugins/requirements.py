"""Whether the packages that a contribution asks for are installed, without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable

__all__ = ["missing_requirements"]

_MODULE = re.compile(r"import:([A-Za-z_]\w*)(?: of (.+))?")
_SIMPLE = re.compile(r"([A-Za-z0-9][\w.-]*)(>=|==)(\d+(?:\.\d+)*)")
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


def missing_requirements(requires: Iterable[str]) -> list[str]:
    """A phrase for each requirement that does not hold here, for example ``requires flashinfer-python>=0.6 (0.5.2 is installed)``.

    A requirement is a PEP 508 text, or ``import:MODULE of DISTRIBUTIONS`` for a top-level module that any of several distributions brings.
    """
    missing = []
    for text in requires:
        if (module := _MODULE.fullmatch(text)) is not None:
            phrase = _missing_module(*module.groups())
        elif (simple := _SIMPLE.fullmatch(text)) is not None:
            phrase = _missing_version(text, *simple.groups())
        else:
            phrase = _missing_general(text)
        missing += [phrase] if phrase else []
    return missing


def _missing_module(name: str, origin: str | None) -> str:
    if importlib.util.find_spec(name) is not None:
        return ""
    return f"requires the module {name}{f' of {origin}' if origin else ''} (not installed)"


def _missing_version(text: str, name: str, relation: str, wanted: str) -> str:
    """``NAME>=1.2`` and ``NAME==1.2``, which nearly all requirements are, without the 30 ms that importing ``packaging`` takes."""
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"requires {text} (not installed)"
    if not _NUMBERS.fullmatch(installed):
        return _missing_general(text)
    has, least = ([int(part) for part in version.split(".")] for version in (installed, wanted))
    length = max(len(has), len(least))  # 1.2 is 1.2.0
    has, least = (version + [0] * (length - len(version)) for version in (has, least))
    met = has >= least if relation == ">=" else has == least
    return "" if met else f"requires {text} ({installed} is installed)"


def _missing_general(text: str) -> str:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        return f"states the requirement {text!r}, which is malformed ({str(error).splitlines()[0]})"
    if requirement.marker is not None and not requirement.marker.evaluate():
        return ""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"requires {text} (not installed)"
    met = requirement.specifier.contains(version, prereleases=True)
    return "" if met else f"requires {text} ({version} is installed)"

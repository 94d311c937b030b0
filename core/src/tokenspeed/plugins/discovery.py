"""Finding installed plugins through their entry points, without importing any of them.

All distributions on ``sys.path`` are walked (``importlib.metadata.entry_points()`` would hide copies that an earlier one shadows, and so hide the
reason why an upgrade has no effect).
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.plugins.first_party import FIRST_PARTY
from tokenspeed.plugins.markers import ENTRY_POINT_GROUP

__all__ = ["BUILTIN", "Discovery", "Found", "Shadowed", "discover"]

#: Name of the plugin inside core.
BUILTIN = "builtin"


@dataclass(frozen=True, kw_only=True)
class Found:
    """One entry point: plugin ``name`` lives in module (or object) ``value`` of ``distribution``."""

    name: str
    value: str
    distribution: str
    version: str
    location: str
    first_party: bool = False


@dataclass(frozen=True, kw_only=True)
class Shadowed:
    """A copy of a plugin's distribution that is never used, because ``by`` (a location) comes first or is newer."""

    distribution: str
    version: str
    location: str
    by: str


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """What was found, by plugin name and distribution, and where it was looked for."""

    found: tuple[Found, ...]
    shadowed: tuple[Shadowed, ...] = ()
    path: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Plugin names that ``--plugins`` takes, each once."""
        return sorted({found.name for found in self.found} - {BUILTIN})

    def where(self) -> str:
        """Where plugins were looked for, for messages: of the folders on the path, those that hold distributions."""
        folders = list(dict.fromkeys(Path(place or ".").resolve() for place in self.path))
        holding = [
            str(folder) for folder in folders if any(folder.glob("*.dist-info")) or any(folder.glob("*.egg-info"))
        ]
        places = ", ".join(holding) or f"nowhere: none of the {len(folders)} folders on the path holds any"
        return f"entry points of group {ENTRY_POINT_GROUP!r} of the distributions in {places}"


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _version_key(version: str) -> tuple[tuple[int, str], ...]:
    """Orders the versions of two copies in one folder; exact enough for that, without importing ``packaging``."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.+-]", version))


@dataclass(frozen=True)
class _Copy:
    distribution: importlib.metadata.Distribution
    name: str
    version: str
    location: str
    place: int
    points: tuple[tuple[str, str], ...]


def _copies(path: Sequence[str]) -> list[_Copy]:
    """Every distribution that has the group, in the order of ``path``; one folder listed twice counts once."""
    copies = []
    seen: set[Path] = set()
    for place, entry in enumerate(path):
        folder = Path(entry or ".").resolve()
        if folder in seen:
            continue
        seen.add(folder)
        for distribution in importlib.metadata.distributions(path=[entry]):
            text = distribution.read_text("entry_points.txt")
            if not text or ENTRY_POINT_GROUP not in text:
                continue
            points = tuple(sorted((p.name, p.value) for p in distribution.entry_points if p.group == ENTRY_POINT_GROUP))
            metadata = distribution.metadata
            if points and metadata["Name"]:
                copies.append(
                    _Copy(
                        distribution,
                        _normalised(metadata["Name"]),
                        metadata["Version"] or "0",
                        str(folder),
                        place,
                        points,
                    )
                )
    return copies


def discover(path: Iterable[str] | None = None, *, first_party: frozenset[str] = FIRST_PARTY) -> Discovery:
    """Find plugins on ``path`` (``sys.path`` unless given). The order of results does not depend on the file system.

    Two distributions that use one plugin name are both returned; whoever activates that name refuses it.
    """
    places = list(sys.path if path is None else path)
    winners: dict[str, _Copy] = {}
    copies = sorted(
        _copies(places), key=lambda c: (c.name, c.place, [(-n, text) for n, text in _version_key(c.version)])
    )
    shadowed = []
    for copy in copies:
        winner = winners.setdefault(copy.name, copy)
        if copy is not winner:
            shadowed.append(
                Shadowed(
                    distribution=copy.name,
                    version=copy.version,
                    location=copy.location,
                    by=f"{winner.version} in {winner.location}",
                )
            )
    found = [
        Found(
            name=name,
            value=value,
            distribution=copy.name,
            version=copy.version,
            location=copy.location,
            first_party=copy.name in first_party,
        )
        for copy in winners.values()
        for name, value in copy.points
    ]
    found.sort(key=lambda f: (f.name, f.distribution))
    return Discovery(found=tuple(found), shadowed=tuple(shadowed), path=tuple(places))

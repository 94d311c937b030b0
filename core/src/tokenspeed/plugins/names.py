"""Nearest names for messages about misspelt ones."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """At most ``limit`` of ``known`` that resemble ``name``, best first: spellings nearly as close as the closest, then those that contain it."""
    from difflib import SequenceMatcher  # only on the way to an error message

    pool = sorted(set(known))
    ratios = {c: SequenceMatcher(None, name.lower(), c.lower()).ratio() for c in pool}
    least = 0.6 if len(name) > 3 else 0.7  # of three letters two alike say nothing: cpu is no way to write tpu
    enough = max(least, max(ratios.values(), default=0.0) - 0.1)
    close = sorted((c for c in pool if ratios[c] >= enough), key=lambda c: -ratios[c])
    needle = name.lower().replace("_", "-")
    containing = [c for c in pool if c not in close and needle and (needle in c.lower() or c.lower() in needle)]
    return (close + containing)[:limit]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'a' or 'b'?`` or an empty string, to be appended to a message."""
    found = nearest(name, known)
    return f"; did you mean {' or '.join(repr(candidate) for candidate in found)}?" if found else ""

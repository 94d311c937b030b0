"""Nearest names for messages about misspelt ones."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """At most ``limit`` of ``known`` that resemble ``name``, best first: close spellings, then those that contain it."""
    import difflib  # only on the way to an error message

    pool = sorted(set(known))
    lowered = {candidate.lower(): candidate for candidate in reversed(pool)}
    close = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=limit, cutoff=0.6)]
    needle = name.lower().replace("_", "-")
    containing = [c for c in pool if c not in close and needle and (needle in c.lower() or c.lower() in needle)]
    return (close + containing)[:limit]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'a' or 'b'?`` or an empty string, to be appended to a message."""
    found = nearest(name, known)
    return f"; did you mean {' or '.join(repr(candidate) for candidate in found)}?" if found else ""

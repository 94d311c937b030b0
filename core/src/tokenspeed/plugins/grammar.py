"""The ``--plugins`` text, the same on the command line, in ``TOKENSPEED_PLUGINS`` and in the config file.

``""``: every installed plugin may be used. ``a,b``: the built-ins, these, and what they need. ``+a``: one in addition. ``-c``: all but this one.
``none``: the built-ins alone (``none,+a`` is ``a``).
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.errors import ConfigError
from tokenspeed.plugins.discovery import BUILTIN, Discovery
from tokenspeed.plugins.names import did_you_mean

__all__ = ["Selection", "parse_plugins"]

_PREFIX = "tokenspeed-plugin-"


@dataclass(frozen=True)
class Selection:
    """The parsed text.

    Attributes:
        only: plugins outside ``named`` are used only where these need them.
        named: in the order given; they rank as PLUGIN, and their opt-in contributions count.
        removed: never used.
    """

    only: bool = False
    named: tuple[str, ...] = ()
    removed: frozenset[str] = frozenset()


def _canonical(name: str) -> str:
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else name


def parse_plugins(text: str, discovery: Discovery | None = None, *, source: str = "--plugins") -> Selection:
    """Read the grammar, and check names against ``discovery`` where it is given.

    Raises:
        ConfigError: bad grammar, or a name that is not installed (the nearest ones and the places searched are named).
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    only = False
    named: dict[str, None] = {}
    removed: set[str] = set()
    for item in items:
        sign, name = (item[0], item[1:].strip()) if item[0] in "+-" else ("", item)
        name = _canonical(name)
        if not name or name[0] in "+-":
            raise ConfigError(f"{source} {text!r}: {item!r} is not a plugin name with an optional + or - before it")
        if name == BUILTIN:
            raise ConfigError(f"{source} {text!r}: the built-ins are always active; 'none' means the built-ins alone")
        if name == "none" and not sign:
            only = True
            continue
        if discovery is not None and name not in discovery.names():
            known = discovery.names()
            raise ConfigError(
                f"{source}: no plugin named {name!r} is installed{did_you_mean(name, known)}\n"
                f"installed: {', '.join(known) or 'none'}\nlooked in {discovery.where()}"
            )
        if sign == "-":
            removed.add(name)
        else:
            only = only or not sign
            named[name] = None
    if "none" in items and any(item[0] not in "+-" and item != "none" for item in items):
        raise ConfigError(f"{source} {text!r}: 'none' stands alone or with +NAME")
    both = sorted(removed & set(named))
    if both:
        raise ConfigError(f"{source} {text!r}: {both[0]} is both asked for and removed")
    return Selection(only=only, named=tuple(named), removed=frozenset(removed))

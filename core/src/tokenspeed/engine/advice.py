"""What to do about a plugin that is not active: it may only have been left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenspeed.plugins.first_party import FIRST_PARTY
from tokenspeed.plugins.names import did_you_mean

if TYPE_CHECKING:
    from tokenspeed.plugins.manager import PluginHost
    from tokenspeed.plugins.registry import Contribution
    from tokenspeed.plugins.specs import Spec

__all__ = ["how_to_get", "left_out", "parser_plugin", "where_parsers_are"]

_PARSERS = "tokenspeed-plugin-parsers-"


def left_out(host: PluginHost) -> list[str]:
    """Plugins that are installed and not used because of ``--plugins``, by name."""
    return sorted(name for name, record in host.records.items() if record.status == "inactive")


def how_to_get(host: PluginHost, distribution: str) -> str:
    """A phrase that stands after "try": add an installed plugin to ``--plugins``, or install its distribution."""
    for name in left_out(host):
        if host.records[name].distribution == distribution:
            return f"adding {name} to --plugins, which leaves it out"
    return f"pip install {distribution}"


def where_parsers_are(host: PluginHost, wanted: str, candidates: Sequence[Contribution[Spec]], flag: str) -> str:
    """What to do about a parser or renderer that a model's spec names and no active plugin has; ``flag`` chooses another one.

    A plugin is named only where the project has one for the family and it is not active: a name alike among ``candidates`` is likelier meant.
    """
    family = parser_plugin(wanted)
    for distribution in (family, f"{_PARSERS}{wanted.replace('_', '-')}"):
        owner = next((r for r in host.records.values() if r.distribution == distribution), None)
        if owner is None and distribution != family:
            continue
        if owner is not None and owner.status == "broken":
            return f"plugin {owner.name}, which may have brought it, is broken: `tokenspeed plugins doctor {owner.name}` says why"
        if distribution and (owner is None or owner.status == "inactive"):
            return f"try {how_to_get(host, distribution)}"
    known = [name for c in candidates for name in (c.spec.name, *getattr(c.spec, "aliases", ()))]
    hint = did_you_mean(wanted, known)
    return f"no installed plugin has one of that name{hint or ';'} {flag} NAME takes another"


def parser_plugin(parser: str) -> str:
    """The first-party distribution that brings a parser, or an empty text: families begin the names of their parsers."""
    plain = parser.replace("_", "-")
    families = [
        name for name in FIRST_PARTY if name.startswith(_PARSERS) and plain.startswith(name.removeprefix(_PARSERS))
    ]
    return max(families, key=len, default="")

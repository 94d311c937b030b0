"""What to do about a plugin that is not active: it may only have been left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenspeed.plugins.first_party import FIRST_PARTY

if TYPE_CHECKING:
    from tokenspeed.plugins.manager import PluginHost

__all__ = ["how_to_get", "left_out", "parser_plugin"]

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


def parser_plugin(parser: str) -> str:
    """The distribution that brings a parser: families begin the names of their parsers."""
    plain = parser.replace("_", "-")
    families = [
        name for name in FIRST_PARTY if name.startswith(_PARSERS) and plain.startswith(name.removeprefix(_PARSERS))
    ]
    return max(families, key=len, default=f"{_PARSERS}{plain}")

"""Entry point: the parser of bare JSON calls."""

from __future__ import annotations

from tokenspeed.plugins import hookimpl
from tokenspeed.plugins.specs import ToolParserSpec


@hookimpl
def tokenspeed_tool_parsers() -> list[ToolParserSpec]:
    """One format."""
    return [ToolParserSpec(name="json", target="tokenspeed_plugin_parsers_json.tools:JsonToolParser")]

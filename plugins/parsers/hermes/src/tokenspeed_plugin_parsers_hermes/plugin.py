"""Entry point: the hermes tool-call parser."""

from __future__ import annotations

from tokenspeed.plugins import ToolParserSpec, hookimpl

__all__ = ["tokenspeed_tool_parsers"]


@hookimpl
def tokenspeed_tool_parsers() -> list[ToolParserSpec]:
    """One format, under the names by which the families that emit it are known."""
    return [
        ToolParserSpec(
            name="hermes",
            target="tokenspeed_plugin_parsers_hermes.parser:HermesToolParser",
            aliases=("qwen25", "qwen", "qwen3"),
            description='calls as JSON between <tool_call> and </tool_call>: {"name": .., "arguments": {..}}',
        )
    ]

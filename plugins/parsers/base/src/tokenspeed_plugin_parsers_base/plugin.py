"""Entry point: the parsers that find nothing, for naming them where a parser is expected."""

from __future__ import annotations

from tokenspeed.plugins import hookimpl
from tokenspeed.plugins.specs import ReasoningParserSpec, ToolParserSpec

_PARSERS = "tokenspeed_plugin_parsers_base.parsers"


@hookimpl
def tokenspeed_reasoning_parsers() -> list[ReasoningParserSpec]:
    """All text is content."""
    return [ReasoningParserSpec(name="base", target=f"{_PARSERS}:BaseReasoningParser", aliases=("passthrough",))]


@hookimpl
def tokenspeed_tool_parsers() -> list[ToolParserSpec]:
    """All text is content."""
    return [ToolParserSpec(name="passthrough", target=f"{_PARSERS}:PassthroughToolParser")]

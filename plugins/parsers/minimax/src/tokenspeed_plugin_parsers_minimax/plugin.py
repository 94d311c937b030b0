"""Entry point: what the MiniMax family contributes."""

from __future__ import annotations

from tokenspeed.plugins import hookimpl
from tokenspeed.plugins.specs import ReasoningParserSpec, ToolParserSpec

_REASONING = "tokenspeed_plugin_parsers_minimax.reasoning"
_TOOLS = "tokenspeed_plugin_parsers_minimax.tools:MiniMaxToolParser"


@hookimpl
def tokenspeed_reasoning_parsers() -> list[ReasoningParserSpec]:
    """The usual split, and the one that keeps the block in the content."""
    return [
        ReasoningParserSpec(
            name="minimax_m2", target=f"{_REASONING}:MiniMaxReasoningParser", aliases=("minimax", "minimax-m2")
        ),
        ReasoningParserSpec(
            name="minimax_m2_append_think",
            target=f"{_REASONING}:MiniMaxAppendThinkParser",
            aliases=("minimax-append-think",),
        ),
    ]


@hookimpl
def tokenspeed_tool_parsers() -> list[ToolParserSpec]:
    """M2, M2.5 and M2.7 write calls alike."""
    return [ToolParserSpec(name="minimax_m2", target=_TOOLS, aliases=("minimax", "minimax-m2"))]

"""Entry point: what the Kimi family contributes."""

from __future__ import annotations

from tokenspeed.plugins import hookimpl
from tokenspeed.plugins.specs import ReasoningParserSpec, ToolParserSpec

_REASONING = "tokenspeed_plugin_parsers_kimi.reasoning"
_XTML = "tokenspeed_plugin_parsers_kimi.xtml"
_TOOLS = "tokenspeed_plugin_parsers_kimi.tools:KimiK2ToolParser"


@hookimpl
def tokenspeed_reasoning_parsers() -> list[ReasoningParserSpec]:
    """One per set of tags; K2.5 differs from K2 in its prompt alone."""
    return [
        ReasoningParserSpec(name="kimi", target=f"{_REASONING}:KimiReasoningParser"),
        ReasoningParserSpec(
            name="kimi_k2", target=f"{_REASONING}:KimiK2ReasoningParser", aliases=("kimi_thinking", "kimi_k2_thinking")
        ),
        ReasoningParserSpec(name="kimi_k25", target=f"{_REASONING}:KimiK2ReasoningParser"),
        ReasoningParserSpec(name="kimi_k3", target=f"{_XTML}:KimiK3ReasoningParser"),
    ]


@hookimpl
def tokenspeed_tool_parsers() -> list[ToolParserSpec]:
    """K2, K2 Thinking and K2.5 write calls alike; K3 has its own markup."""
    return [
        ToolParserSpec(name="kimi_k2", target=_TOOLS, aliases=("kimik2", "kimi_k25")),
        ToolParserSpec(name="kimi_k3", target=f"{_XTML}:KimiK3ToolParser", aliases=("kimik3",)),
    ]

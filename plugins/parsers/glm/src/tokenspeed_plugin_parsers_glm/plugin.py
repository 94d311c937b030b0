"""Entry point: what the GLM family contributes."""

from __future__ import annotations

from tokenspeed.plugins import hookimpl
from tokenspeed.plugins.specs import ReasoningParserSpec, ToolParserSpec

_REASONING = "tokenspeed_plugin_parsers_glm.reasoning:GlmReasoningParser"
_TOOLS = "tokenspeed_plugin_parsers_glm.tools:GlmToolParser"


@hookimpl
def tokenspeed_reasoning_parsers() -> list[ReasoningParserSpec]:
    """Both read the prompt for whether the block is open."""
    return [
        ReasoningParserSpec(name="glm45", target=_REASONING, aliases=("glm46", "glm45_moe")),
        ReasoningParserSpec(name="glm47", target=_REASONING, aliases=("glm5", "glm47_moe")),
    ]


@hookimpl
def tokenspeed_tool_parsers() -> list[ToolParserSpec]:
    """With and without line breaks between the elements: one parser reads both."""
    return [
        ToolParserSpec(name="glm45", target=_TOOLS, aliases=("glm46", "glm45_moe")),
        ToolParserSpec(name="glm47", target=_TOOLS, aliases=("glm5", "glm47_moe")),
    ]

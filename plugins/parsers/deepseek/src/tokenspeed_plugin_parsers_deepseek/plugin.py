"""Entry point: what the DeepSeek family contributes."""

from __future__ import annotations

from tokenspeed.plugins import hookimpl
from tokenspeed.plugins.specs import ReasoningParserSpec, RendererSpec, ToolParserSpec

_REASONING = "tokenspeed_plugin_parsers_deepseek.reasoning:DeepSeekReasoningParser"
_TOOLS = "tokenspeed_plugin_parsers_deepseek.tools"
_DSML = "tokenspeed_plugin_parsers_deepseek.dsml:DsmlToolParser"


@hookimpl
def tokenspeed_reasoning_parsers() -> list[ReasoningParserSpec]:
    """Both read the prompt for whether thinking is on."""
    return [
        ReasoningParserSpec(name="deepseek_r1", target=_REASONING, aliases=("deepseek", "deepseek-r1")),
        ReasoningParserSpec(
            name="deepseek_v31", target=_REASONING, aliases=("deepseek31", "deepseek_v32", "deepseek32", "deepseek_v4")
        ),
    ]


@hookimpl
def tokenspeed_tool_parsers() -> list[ToolParserSpec]:
    """One per wire format."""
    return [
        ToolParserSpec(name="deepseek_v3", target=f"{_TOOLS}:DeepSeekV3ToolParser", aliases=("deepseek", "deepseekv3")),
        ToolParserSpec(
            name="deepseek_v31", target=f"{_TOOLS}:DeepSeekV31ToolParser", aliases=("deepseek31", "deepseekv31")
        ),
        ToolParserSpec(
            name="deepseek_v32", target=_DSML, aliases=("deepseek32", "deepseekv32", "deepseek_v4", "deepseek_dsml")
        ),
    ]


@hookimpl
def tokenspeed_renderers() -> list[RendererSpec]:
    """V3.2 brings no chat template."""
    return [
        RendererSpec(
            name="deepseek_v32",
            target="tokenspeed_plugin_parsers_deepseek.renderer:DeepSeekV32Renderer",
            aliases=("deepseek32", "deepseekv32"),
        )
    ]

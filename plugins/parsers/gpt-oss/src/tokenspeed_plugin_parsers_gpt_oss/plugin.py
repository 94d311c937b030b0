"""Entry point: what gpt-oss contributes."""

from __future__ import annotations

from tokenspeed.plugins import hookimpl
from tokenspeed.plugins.specs import ReasoningParserSpec, RendererSpec, ToolParserSpec

_PARSERS = "tokenspeed_plugin_parsers_gpt_oss.parsers"


@hookimpl
def tokenspeed_reasoning_parsers() -> list[ReasoningParserSpec]:
    """Harmony channels."""
    return [
        ReasoningParserSpec(
            name="gpt_oss", target=f"{_PARSERS}:HarmonyReasoningParser", aliases=("gpt-oss", "harmony", "openai_gptoss")
        )
    ]


@hookimpl
def tokenspeed_tool_parsers() -> list[ToolParserSpec]:
    """Harmony recipients."""
    return [
        ToolParserSpec(name="gpt_oss", target=f"{_PARSERS}:HarmonyToolParser", aliases=("gpt-oss", "harmony", "openai"))
    ]


@hookimpl
def tokenspeed_renderers() -> list[RendererSpec]:
    """Harmony prompts."""
    return [
        RendererSpec(
            name="gpt_oss",
            target="tokenspeed_plugin_parsers_gpt_oss.renderer:HarmonyRenderer",
            aliases=("gpt-oss", "harmony"),
        )
    ]

"""Entry point: what the Mistral family contributes."""

from __future__ import annotations

from tokenspeed.plugins import hookimpl
from tokenspeed.plugins.specs import ReasoningParserSpec, ToolParserSpec

_PACKAGE = "tokenspeed_plugin_parsers_mistral"


@hookimpl
def tokenspeed_reasoning_parsers() -> list[ReasoningParserSpec]:
    """Magistral."""
    return [
        ReasoningParserSpec(
            name="mistral", target=f"{_PACKAGE}.reasoning:MistralReasoningParser", aliases=("magistral",)
        )
    ]


@hookimpl
def tokenspeed_tool_parsers() -> list[ToolParserSpec]:
    """All tokenizer versions: one parser reads both forms."""
    return [ToolParserSpec(name="mistral", target=f"{_PACKAGE}.tools:MistralToolParser")]

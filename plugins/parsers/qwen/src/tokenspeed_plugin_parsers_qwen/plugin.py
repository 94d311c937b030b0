"""Entry point: what the Qwen family contributes. Qwen2.5 and Qwen3 calls are in hermes form; that parser is a plugin of its own."""

from __future__ import annotations

from tokenspeed.plugins import hookimpl
from tokenspeed.plugins.specs import ReasoningParserSpec, ToolParserSpec

_REASONING = "tokenspeed_plugin_parsers_qwen.reasoning:QwenReasoningParser"
_CODER = "tokenspeed_plugin_parsers_qwen.coder:QwenCoderToolParser"


@hookimpl
def tokenspeed_reasoning_parsers() -> list[ReasoningParserSpec]:
    """Both read the prompt for whether the block is open."""
    return [
        ReasoningParserSpec(name="qwen3", target=_REASONING, aliases=("qwen",)),
        ReasoningParserSpec(name="qwen3_thinking", target=_REASONING, aliases=("qwen3-thinking", "qwen_thinking")),
    ]


@hookimpl
def tokenspeed_tool_parsers() -> list[ToolParserSpec]:
    """One format, two names."""
    return [ToolParserSpec(name="qwen3_coder", target=_CODER, aliases=("qwen3_xml", "qwen_coder", "qwen_xml"))]

"""Entry point: what the Llama family contributes."""

from __future__ import annotations

from tokenspeed.plugins import hookimpl
from tokenspeed.plugins.specs import ToolParserSpec

_PACKAGE = "tokenspeed_plugin_parsers_llama"


@hookimpl
def tokenspeed_tool_parsers() -> list[ToolParserSpec]:
    """JSON calls of Llama 3.1 and 3.2; Python calls of Llama 3.2 and 4, with or without their markers."""
    return [
        ToolParserSpec(
            name="llama3_json",
            target=f"{_PACKAGE}.json_calls:LlamaJsonToolParser",
            aliases=("llama", "llama3", "llama4_json"),
        ),
        ToolParserSpec(
            name="pythonic", target=f"{_PACKAGE}.pythonic:PythonicToolParser", aliases=("llama4_pythonic", "llama4")
        ),
    ]

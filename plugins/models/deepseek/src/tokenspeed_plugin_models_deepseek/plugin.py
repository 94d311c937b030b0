"""What the plugin contributes. Imports nothing heavy."""

from __future__ import annotations

from tokenspeed.plugins import ModelSpec, Priority, hookimpl

_MODULE = "tokenspeed_plugin_models_deepseek.model"


@hookimpl
def tokenspeed_models() -> list[ModelSpec]:
    """Model classes and the checkpoints they serve."""
    return [
        ModelSpec(
            name="deepseek-v2",
            target=f"{_MODULE}:DeepseekV2ForCausalLM",
            priority=Priority.PERFORMANT,
            architectures=("DeepseekV2ForCausalLM",),
            description="DeepSeek V2, V2 Lite, V2.5 and Coder V2",
        ),
        ModelSpec(
            name="deepseek-v3",
            target=f"{_MODULE}:DeepseekV3ForCausalLM",
            priority=Priority.PERFORMANT,
            architectures=("DeepseekV3ForCausalLM",),
            tool_parser="deepseek_v3",
            description="DeepSeek V3 and R1, unquantised",
        ),
    ]

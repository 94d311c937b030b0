"""What the plugin contributes. Imports nothing heavy."""

from __future__ import annotations

from tokenspeed.plugins import ModelSpec, Priority, hookimpl


@hookimpl
def tokenspeed_models() -> list[ModelSpec]:
    """The dense models of Qwen3."""
    return [
        ModelSpec(
            name="qwen3",
            target="tokenspeed_plugin_models_qwen3.model:Qwen3ForCausalLM",
            priority=Priority.PERFORMANT,
            architectures=("Qwen3ForCausalLM",),
            gguf_architectures=("qwen3",),
            tool_parser="hermes",
            reasoning_parser="qwen3",
            description="Qwen3's dense models",
        )
    ]

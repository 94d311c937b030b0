"""What the plugin contributes. Imports nothing heavy."""

from __future__ import annotations

from tokenspeed.plugins import ModelSpec, Priority, hookimpl

_MODULE = "tokenspeed_plugin_models_llama.model"


@hookimpl
def tokenspeed_models() -> list[ModelSpec]:
    """Model classes and the checkpoints they serve."""
    return [
        ModelSpec(
            name="llama",
            target=f"{_MODULE}:LlamaForCausalLM",
            priority=Priority.PERFORMANT,
            architectures=("LlamaForCausalLM",),
            gguf_architectures=("llama",),
            tool_parser="hermes",
            description="Llama, SmolLM, Yi and others saved as LlamaForCausalLM",
        ),
        ModelSpec(
            name="mistral",
            target=f"{_MODULE}:MistralForCausalLM",
            priority=Priority.PERFORMANT,
            architectures=("MistralForCausalLM",),
            tool_parser="mistral",
            description="Mistral's dense models",
        ),
    ]

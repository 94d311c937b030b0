"""Llama and Mistral: the dense decoder of ``tokenspeed.layers``, which is what Llama made common."""

from __future__ import annotations

from typing import Any

from tokenspeed.layers import DenseCausalLM, DenseShape

__all__ = ["LlamaForCausalLM", "MistralForCausalLM"]


class LlamaForCausalLM(DenseCausalLM):
    """Llama: grouped-query attention, any of the rotary scalings, biases and tied embeddings as ``config.json`` says."""


class MistralForCausalLM(DenseCausalLM):
    """Mistral's dense models: Llama with a sliding window, which later releases switch off (``null``)."""

    @classmethod
    def shape(cls, config: Any) -> DenseShape:
        return DenseShape.of(config, window=int(getattr(config, "sliding_window", 4096) or 0))

"""Qwen3: the dense decoder with a norm on each query and key head."""

from __future__ import annotations

from typing import Any

from tokenspeed.errors import ModelError
from tokenspeed.layers import DenseCausalLM, DenseShape

__all__ = ["Qwen3ForCausalLM"]


class Qwen3ForCausalLM(DenseCausalLM):
    """Qwen3's dense models.

    Raises:
        ModelError: the config switches sliding windows on, which no released checkpoint does.
    """

    @classmethod
    def shape(cls, config: Any) -> DenseShape:
        if getattr(config, "use_sliding_window", False):
            raise ModelError(
                "Qwen3 with use_sliding_window is not supported; set it to false in config.json if the model was trained without"
            )
        return DenseShape.of(config, qk_norm=True)

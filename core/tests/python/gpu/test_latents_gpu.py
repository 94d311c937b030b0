"""DeepSeek on an accelerator: pages of latents, prompts and decodes as the model asks for them, with and without experts.

Needs the plugins hardware-cuda, kernels-triton, attention-mla and models-deepseek; the case of FlashInfer needs attention-flashinfer too.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.layers.context import LayerContext
from tokenspeed.messages import SamplingParams
from tokenspeed.plugins.selection import load_target
from tokenspeed.testing.harness import kernel_registry
from tokenspeed.weights.config_view import ConfigView
from tokenspeed.weights.describe import describe_model
from tokenspeed.weights.dummy import dummy_weights

pytestmark = pytest.mark.gpu

VOCAB = 1000
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 192,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
#: Layers before the first one with experts, by kind.
KINDS = {"experts": 1, "dense": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``checkpoint(kind)``: where it lies, written once; matrices are wide enough that tokens are far apart."""
    made: dict[str, str] = {}

    def of(kind: str) -> str:
        if kind not in made:
            folder: Path = tmp_path_factory.mktemp(kind)
            config = CONFIG | {"first_k_dense_replace": KINDS[kind]}
            context = LayerContext(
                dtype=torch.float32, device=torch.device("cpu"), select_kernel=kernel_registry().select
            )
            model = load_target("tokenspeed_plugin_models_deepseek.model:DeepseekV3ForCausalLM")(
                ConfigView(config), context
            )
            wide = {name: t * (80.0 / t.shape[-1] ** 0.5) if t.dim() > 1 else t for name, t in dummy_weights(model)}
            save_file(wide, folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps(config))
            made[kind] = str(folder)
        return made[kind]

    return of


def engine(path: str, **settings: Any) -> LocalEngine:
    settings = {
        "dtype": "float32",
        "max_num_seqs": 16,
        "max_total_tokens": 16384,
        "chunked_prefill_size": 512,
    } | settings
    return LocalEngine(assemble(EngineConfig(model=path, **settings), describe_model(path, "auto")))


def generated(made: LocalEngine) -> list[list[int]]:
    """Greedy tokens of prompts on both sides of page and block borders, two with a prefix of several pages in common."""
    rng = np.random.default_rng(3)
    shared = rng.integers(0, VOCAB, 320).tolist()
    asked = [rng.integers(0, VOCAB, n).tolist() for n in (1, 63, 65, 200, 520)]
    asked += [shared + rng.integers(0, VOCAB, n).tolist() for n in (3, 64)]
    params = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    return [[t for part in parts for t in part.tokens] for parts in made.generate(asked, params)]


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], str], few_threads: int) -> Callable[[str], list[list[int]]]:
    """``reference(kind)``: what the built-in kernels and attention generate on the CPU, computed once."""
    found: dict[str, list[list[int]]] = {}

    def of(kind: str) -> list[list[int]]:
        if kind not in found:
            settings = {"device": "cpu", "plugins": "models-deepseek", "num_threads": few_threads}
            found[kind] = generated(engine(checkpoint(kind), **settings))
        return found[kind]

    return of


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    "settings",
    [{}, {"enforce_eager": True, "disable_overlap_schedule": True}, {"chunked_prefill_size": 100, "max_num_seqs": 5}],
    ids=["default", "eager, no overlap", "chunks"],
)
def test_greedy_tokens_in_fp32_are_those_of_the_cpu_reference(
    checkpoint: Callable[[str], str], reference: Callable[[str], list[list[int]]], kind: str, settings: dict[str, Any]
) -> None:
    made = engine(checkpoint(kind), attention_backend="mla", **settings)
    assert generated(made) == reference(kind)
    assert generated(made) == reference(kind), "and the same with the prompts in the cache"


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_first_tokens_in_bf16_are_mostly_those_of_fp32(
    checkpoint: Callable[[str], str], reference: Callable[[str], list[list[int]]], kv_cache_dtype: str
) -> None:
    """Rounding moves a token here and there; a wrong part of a latent moves nearly all."""
    got = generated(engine(checkpoint("dense"), dtype="bfloat16", kv_cache_dtype=kv_cache_dtype))
    same = [have[0] == want[0] for have, want in zip(got, reference("dense"), strict=True)]
    assert sum(same) >= 5


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed")
def test_flashinfer_over_latents_agrees_in_most_first_tokens(
    checkpoint: Callable[[str], str], reference: Callable[[str], list[list[int]]]
) -> None:
    got = generated(engine(checkpoint("dense"), dtype="bfloat16", attention_backend="flashinfer-mla"))
    same = [have[0] == want[0] for have, want in zip(got, reference("dense"), strict=True)]
    assert sum(same) >= 5

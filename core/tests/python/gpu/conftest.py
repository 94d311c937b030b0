"""What modules here share: how they use the host's processors, and a small model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

#: Of CPU references and of what torch computes on the host. Their operations are small and gain little from more; where several test processes run beside each
#: other, a thread a processor in each of them is more threads than there are processors, and each operation waits for the last of its own.
THREADS = 4


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> Iterator[int]:
    """Threads for CPU references (``num_threads``), and of torch meanwhile."""
    before = torch.get_num_threads()
    threads = min(THREADS, before)
    torch.set_num_threads(threads)
    yield threads
    torch.set_num_threads(before)


HIDDEN, LAYERS, VOCAB, HEADS, KV_HEADS, DIM = 256, 4, 1000, 8, 2, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class RandomLlama:
    """A checkpoint, and how many token ids it knows."""

    path: str
    vocab: int


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> RandomLlama:
    return RandomLlama(write_llama(tmp_path_factory.mktemp("model")), VOCAB)


def write_llama(directory: Path) -> str:
    """Write a small Llama with random fp32 weights."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (1.6 / shape[-1] ** 0.5)

    tensors = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN) * 8, "model.norm.weight": torch.ones(HIDDEN)}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        tensors |= {
            f"{at}.self_attn.q_proj.weight": draw(HEADS * DIM, HIDDEN),
            f"{at}.self_attn.k_proj.weight": draw(KV_HEADS * DIM, HIDDEN),
            f"{at}.self_attn.v_proj.weight": draw(KV_HEADS * DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": draw(HIDDEN, HEADS * DIM),
            f"{at}.mlp.gate_proj.weight": draw(512, HIDDEN),
            f"{at}.mlp.up_proj.weight": draw(512, HIDDEN),
            f"{at}.mlp.down_proj.weight": draw(HIDDEN, 512),
            f"{at}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return str(directory)

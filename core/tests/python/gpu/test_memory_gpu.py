"""On a device the engine takes the share that ``--gpu-memory-utilization`` says, in the heaviest steps too, and says what to lower where that cannot be.

Needs the plugins hardware-cuda, kernels-triton, attention-triton and models-llama; prompts go through attention-flashinfer where it is installed. The model has
random weights.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.errors import ConfigError
from tokenspeed.messages import SamplingParams
from tokenspeed.weights.describe import describe_model

pytestmark = pytest.mark.gpu

VOCAB = 32768
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 40960,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def empty() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts engines of a model of some 1.2 GB; gives the device back after the test."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    empty()

    def make(**settings: Any) -> LocalEngine:
        config = EngineConfig(
            model=str(tmp_path), load_format="dummy", device="cuda", skip_tokenizer_init=True, **settings
        )
        return LocalEngine(assemble(config, describe_model(str(tmp_path), "dummy")))

    yield make
    empty()


def used() -> float:
    free, total = torch.cuda.mem_get_info()
    return 1 - free / total


def heavy(engine: LocalEngine) -> None:
    """Full steps of prompts, then full steps of decodes, every row of which asks for all that a row can."""
    rng = np.random.default_rng(1)
    params = SamplingParams(
        max_new_tokens=12, temperature=0.8, top_p=0.9, presence_penalty=0.3, logprobs=5, ignore_eos=True, seed=3
    )
    for length in [*[200] * 256, 20000, 8192, 8192]:
        engine.add_request(rng.integers(0, VOCAB, length).tolist(), params)
    while engine.busy:
        for item in engine.step():
            assert item.finish != "error", item


@pytest.mark.parametrize("share", [0.3, 0.9, 0.98])
def test_the_device_is_used_up_to_the_share_that_was_asked_for(start: Any, share: float) -> None:
    engine = start(gpu_memory_utilization=share)
    ready = used()
    heavy(engine)
    loaded = used()
    print(f"share {share}: {ready:.4f} when ready, {loaded:.4f} after heavy steps; graphs {engine.info.graphs}")
    print({name: f"{size / 2**30:.2f} GiB" for name, size in engine.info.memory.items()})
    assert share - 0.02 < ready < share + 0.003
    assert loaded < share + 0.01


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_seqs": 32, "chunked_prefill_size": 2048}, {"cudagraph_capture_sizes": (1, 8)}]
)
def test_graphs_take_no_more_than_is_kept_for_them(start: Any, settings: dict[str, Any]) -> None:
    text = start(gpu_memory_utilization=0.5, **settings).info.graphs
    found = re.search(r"([\d.]+) (\w+) \(([\d.]+) (\w+) kept for them\)", text)
    assert found, text
    took, kept = (float(found[i]) * UNITS[found[i + 1]] for i in (1, 3))
    print(text)
    assert 0 < took <= kept


def test_a_pool_that_the_device_has_not_the_memory_for_is_refused_by_its_flag(start: Any) -> None:
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes: a KV pool of .* lower --kv-cache-memory-bytes"):
        start(kv_cache_memory_bytes=int(total * 0.995))


def test_too_little_memory_for_the_largest_step_names_what_makes_it_smaller(start: Any) -> None:
    """With the weights in place and little beside them."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(2.0 * 2**30 / total)
    try:
        with pytest.raises(
            ConfigError, match=r"memory ran out while .* \(CUDA out of memory\): lower --chunked-prefill-size"
        ):
            start(max_total_tokens=4096, chunked_prefill_size=32768)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_an_eager_start_keeps_nothing_for_graphs_and_says_so(start: Any) -> None:
    info = start(gpu_memory_utilization=0.3, enforce_eager=True).info
    assert info.graphs == "off (--enforce-eager)"
    assert "graphs" not in info.memory

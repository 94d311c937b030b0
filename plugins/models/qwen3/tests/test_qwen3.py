"""Qwen3 gives the logits and the greedy tokens of ``transformers`` on a small random checkpoint."""

from __future__ import annotations

import gguf
import pytest
import torch
from tokenspeed_plugin_models_qwen3.model import Qwen3ForCausalLM
from tokenspeed_plugin_models_qwen3.plugin import tokenspeed_models
from transformers import AutoModelForCausalLM, Qwen3Config

from tokenspeed.errors import ModelError
from tokenspeed.testing.harness import ModelHarness
from tokenspeed.weights.describe import describe_model

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
PROMPT = [5, 17, 80, 299, 3, 3, 41, 120, 7, 250, 66]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(transformers model, its directory): weights large enough that a missing norm changes every logit."""
    torch.manual_seed(0)
    config = Qwen3Config(**SMALL, architectures=["Qwen3ForCausalLM"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    directory = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(directory)
    return model, directory


def test_logits_of_a_prompt_in_chunks_are_those_of_transformers(checkpoint):
    model, directory = checkpoint
    harness = ModelHarness(Qwen3ForCausalLM, describe_model(str(directory), "auto"))
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    for chunk in (0, 3):
        _, logits = harness.prefill(PROMPT, chunk)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_greedy_tokens_are_those_of_transformers(checkpoint):
    model, directory = checkpoint
    harness = ModelHarness(Qwen3ForCausalLM, describe_model(str(directory), "auto"))
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert harness.greedy(PROMPT, 12) == out[0, len(PROMPT) :].tolist()


def test_a_gguf_file_gives_the_logits_of_the_checkpoint_it_was_made_from(checkpoint, tmp_path):
    """E16: the architecture that the plugin declares can be reached."""
    model, directory = checkpoint
    path = tmp_path / "qwen3.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(SMALL["num_hidden_layers"])
    writer.add_context_length(SMALL["max_position_embeddings"])
    writer.add_embedding_length(SMALL["hidden_size"])
    writer.add_feed_forward_length(SMALL["intermediate_size"])
    writer.add_head_count(SMALL["num_attention_heads"])
    writer.add_head_count_kv(SMALL["num_key_value_heads"])
    writer.add_key_length(SMALL["head_dim"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(SMALL["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, SMALL["num_hidden_layers"])
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            writer.add_tensor(names.get_name(name, (".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    description = describe_model(str(path))
    (spec,) = tokenspeed_models()
    assert description.gguf_architecture in spec.gguf_architectures
    assert description.architecture in spec.architectures
    _, logits = ModelHarness(Qwen3ForCausalLM, description).prefill(PROMPT)
    _, expected = ModelHarness(Qwen3ForCausalLM, describe_model(str(directory))).prefill(PROMPT)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_a_sliding_window_is_refused():
    config = Qwen3Config(**SMALL, use_sliding_window=True)
    with pytest.raises(ModelError, match="use_sliding_window"):
        Qwen3ForCausalLM.cache_groups(config, 1)

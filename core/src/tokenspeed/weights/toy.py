"""The built-in toy model: its config and its byte tokenizer. Torch-free; the model class is ``tokenspeed.builtin.toy``."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tokenspeed.byte_alphabet import byte_alphabet

__all__ = ["TOY_CHAT_TEMPLATE", "TOY_CONFIG", "TOY_NAME", "TOY_SPECIAL", "build_toy_tokenizer"]

TOY_NAME = "toy"
_BYTES = 256
_SPECIAL = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
TOY_SPECIAL: dict[str, int] = {"bos_token_id": _BYTES, "eos_token_id": _BYTES + 1, "eot_token_id": _BYTES + 3}

TOY_CONFIG: dict[str, Any] = {
    "architectures": ["ToyForCausalLM"],
    "model_type": "toy",
    "vocab_size": _BYTES + len(_SPECIAL),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": TOY_SPECIAL["bos_token_id"],
    "eos_token_id": TOY_SPECIAL["eos_token_id"],
}

TOY_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_toy_tokenizer() -> Tokenizer:
    """Every byte is its own token (id = byte value); four special tokens follow at 256."""
    tokenizer = Tokenizer(BPE(vocab={char: byte for byte, char in enumerate(byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    return tokenizer

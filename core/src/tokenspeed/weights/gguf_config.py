"""``config.json`` as a GGUF file implies it, and the names of its tensors in the Hugging Face layout. Torch-free."""

from __future__ import annotations

from typing import Any

from tokenspeed.errors import ModelError
from tokenspeed.weights.gguf_file import GgufFile

__all__ = ["gguf_to_hf_config", "hf_tensor_name"]

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Not weights: rotary factors are folded into the config.
_IGNORED = {"rope_freqs.weight"}

_F32, _F16, _BF16 = 0, 1, 30
_DTYPES = {_F32: "float32", _F16: "float16", _BF16: "bfloat16"}


def hf_tensor_name(name: str) -> str | None:
    """Checkpoint name of a GGUF tensor; ``None`` for one that is not a weight.

    Raises:
        ModelError: the tensor has no counterpart.
    """
    if name in _TOP:
        return _TOP[name]
    if name in _IGNORED:
        return None
    head, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    layer, _, kind = rest.rpartition(".")
    if head == "blk" and index.isdigit() and layer in _BLOCK and kind in ("weight", "bias"):
        return f"model.layers.{index}.{_BLOCK[layer]}.{kind}"
    raise ModelError(
        f"GGUF tensor {name!r} has no known counterpart in a Hugging Face checkpoint; use the safetensors version of this model"
    )


def gguf_to_hf_config(file: GgufFile) -> dict[str, Any]:
    """The config in ``config.json`` form: what every decoder's file says in the same words.

    ``architectures[0]`` is named after the family, as most Hugging Face classes are; whether a file of that family can be served at all is for
    ``ModelSpec.gguf_architectures`` to say.

    Raises:
        ModelError: a needed value is missing.
    """
    architecture = str(file.get("general.architecture", ""))
    if not architecture:
        raise ModelError(f"{file.path} lacks general.architecture; the file is incomplete")

    def need(key: str) -> Any:
        value = file.get(f"{architecture}.{key}")
        if value is None:
            raise ModelError(f"{file.path} lacks {architecture}.{key}; the file is incomplete")
        return value

    heads = int(need("attention.head_count"))
    hidden = int(need("embedding_length"))
    head_dim = int(file.get(f"{architecture}.attention.key_length", hidden // heads))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} holds no token_embd.weight; it is one part of a split file or no language model")
    config: dict[str, Any] = {
        "architectures": [f"{architecture[0].upper()}{architecture[1:]}ForCausalLM"],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.get(f"{architecture}.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(need("context_length")),
        "rms_norm_eps": _short(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(file.get(f"{architecture}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, architecture),
        "vocab_size": embedding.shape[1],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "torch_dtype": _DTYPES.get(embedding.type, "float32"),
    }
    if int(file.get(f"{architecture}.expert_count", 0)):
        raise ModelError(f"{file.path} is a mixture of experts; use the safetensors version of this model")
    rotary = int(file.get(f"{architecture}.rope.dimension_count", head_dim))
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    for key in ("bos", "eos"):
        value = file.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            config[f"{key}_token_id"] = int(value)
    return config


def _short(value: float) -> float:
    """The file holds fp32; its shortest decimal is what the checkpoint's JSON said (1e-05, not 9.999999747378752e-06)."""
    return float(f"{value:.7g}")


def _rope_scaling(file: GgufFile, architecture: str) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        # Llama 3.1 and later: the file holds only the resulting per-frequency divisors, which have one known origin.
        scaling = _llama3_scaling(file, architecture)
        if scaling is not None:
            return scaling
        raise ModelError(
            f"{file.path}: its rotary factors match no known scaling; use the safetensors version of this model"
        )
    kind = file.get(f"{architecture}.rope.scaling.type", "none")
    if kind in ("none", None):
        return None
    factor = _short(file.get(f"{architecture}.rope.scaling.factor", 1.0))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = file.get(f"{architecture}.rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "factor": factor,
            **({"original_max_position_embeddings": int(original)} if original else {}),
        }
    raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; use the safetensors version of this model")


def _llama3_scaling(file: GgufFile, architecture: str) -> dict[str, Any] | None:
    """Recover ``factor`` as the largest divisor; the other three constants are the same in every Llama 3.x release."""
    import numpy as np

    info = file.tensors["rope_freqs.weight"]
    factors = np.frombuffer(file.data, dtype="<f4", count=info.shape[0], offset=info.offset)
    factor = _short(float(factors.max()))
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    base = float(file.get(f"{architecture}.rope.freq_base", 10000.0))
    dim = 2 * len(factors)
    wavelength = 2 * np.pi * base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    smooth = (8192 / wavelength - 1.0) / 3.0
    expected = np.where(smooth >= 1, 1.0, np.where(smooth <= 0, factor, 1 / ((1 - smooth) / factor + smooth)))
    return scaling if np.allclose(expected, factors, rtol=1e-3) else None

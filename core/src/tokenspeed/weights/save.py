"""A described checkpoint written as a Hugging Face directory: config, weights in safetensors, tokenizer. Tests and benchmarks compare formats with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tokenspeed.errors import ModelError
from tokenspeed.weights.describe import ModelDescription
from tokenspeed.weights.gguf_tokenizer import GgufTokenizer, build_tokenizer
from tokenspeed.weights.stream import iterate_weights

__all__ = ["save_as_hf"]

_DEFAULT_SHARD_BYTES = 1 << 30


def save_as_hf(
    description: ModelDescription,
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = _DEFAULT_SHARD_BYTES,
) -> Path:
    """Write the GGUF file behind ``description`` to the directory ``path``, dequantised to ``dtype``.

    Shards are closed when they reach ``shard_bytes``; one shard is written as ``model.safetensors``, more with an index.

    Raises:
        ModelError: ``description`` is not a GGUF file.
    """
    if description.format != "gguf":
        raise ModelError(f"{description.path} is {description.format}, not a GGUF file")
    target = Path(path)
    target.mkdir(parents=True, exist_ok=True)
    config = description.config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(target / "config.json", config)
    _save_tokenizer(build_tokenizer(description.path), config, target)
    _save_weights(description, target, dtype, shard_bytes)
    return target


def _save_weights(description: ModelDescription, target: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total = 0

    def close() -> None:
        save_file(pending, target / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in iterate_weights(description):
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > shard_bytes:
            close()
        pending[name] = tensor.to(dtype).contiguous()
        total += pending[name].nbytes
    close()
    if len(shards) == 1:
        (target / "shard-0.safetensors").rename(target / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        (target / f"shard-{index}.safetensors").rename(target / file)
        weight_map |= dict.fromkeys(names, file)
    _write_json(target / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _save_tokenizer(built: GgufTokenizer, config: dict[str, Any], target: Path) -> None:
    built.tokenizer.save(str(target / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "add_bos_token": built.add_bos,
        "clean_up_tokenization_spaces": False,
    }
    for name in ("bos", "eos", "unk", "pad"):
        token = built.special.get(f"{name}_token_id")
        if token is not None:
            settings[f"{name}_token"] = built.tokenizer.id_to_token(token)
    if built.chat_template:
        settings["chat_template"] = built.chat_template
    _write_json(target / "tokenizer_config.json", settings)
    generation = {
        key: value for key, value in built.special.items() if key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    _write_json(target / "generation_config.json", generation)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")

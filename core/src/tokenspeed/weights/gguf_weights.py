"""Tensors of a GGUF file, dequantised, with the names and the head order of a Hugging Face checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator

import gguf
import numpy as np
import torch

from tokenspeed.errors import ModelError
from tokenspeed.weights.gguf_config import gguf_to_hf_config, hf_tensor_name
from tokenspeed.weights.gguf_file import GgufFile, GgufTensor

__all__ = ["dequantize_tensor", "iterate_gguf"]


def dequantize_tensor(file: GgufFile, info: GgufTensor) -> torch.Tensor:
    """One tensor in torch's axis order: fp32, or fp16 and bf16 as stored.

    Raises:
        ModelError: its type is unknown to this ``gguf`` package, or the file ends inside it.
    """
    try:
        kind = gguf.GGMLQuantizationType(info.type)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ModelError(
            f"{file.path}: tensor {info.name!r} has type {info.type}, which the installed gguf package does not know"
        ) from None
    elements = math.prod(info.shape)
    size = elements // block * block_bytes
    if info.offset + size > len(file.data):
        raise ModelError(f"{file.path} ends inside tensor {info.name!r}; download it again")
    shape = info.shape[::-1]
    # Copied out of the map at once: the file may be closed while the tensor lives.
    raw = np.frombuffer(file.data, dtype=np.uint8, count=size, offset=info.offset)
    if kind is gguf.GGMLQuantizationType.F32:
        return torch.from_numpy(raw.view(np.float32).reshape(shape).copy())
    if kind is gguf.GGMLQuantizationType.F16:
        return torch.from_numpy(raw.view(np.float16).reshape(shape).copy())
    if kind is gguf.GGMLQuantizationType.BF16:
        return torch.from_numpy(raw.view(np.int16).reshape(shape).copy()).view(torch.bfloat16)
    rows = raw.reshape(*shape[:-1], shape[-1] // block * block_bytes)
    try:
        wide = gguf.dequantize(rows, kind)
    except NotImplementedError:
        raise ModelError(
            f"{file.path}: tensor {info.name!r} is stored as {kind.name}, which cannot be dequantised here"
        ) from None
    return torch.from_numpy(wide)


def iterate_gguf(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor in file order.

    llama.cpp rotates pairs (2i, 2i + 1) where Hugging Face rotates (i, i + half): its converter reorders the rows of the query and key projections of
    ``llama`` files, which is undone here.

    Raises:
        ModelError: the file cannot be read or holds what has no counterpart.
    """
    with GgufFile(path) as file:
        config = gguf_to_hf_config(file)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        reorder = file.get("general.architecture") == "llama"
        for info in file.tensors.values():
            name = hf_tensor_name(info.name)
            if name is None:
                continue
            tensor = dequantize_tensor(file, info)
            layer = info.name.split(".")[-2]
            yield name, _pair_halves(tensor, heads[layer]) if reorder and layer in heads else tensor


def _pair_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (head, i, 0..1) -> (head, 0..1, i); a bias has rows only."""
    rows = tensor.shape[0]
    return tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

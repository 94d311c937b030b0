"""Which checkpoint this is, wherever it lies: a digest of its configuration, of its files' headers and of samples of every tensor."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from tokenspeed.errors import ModelError
from tokenspeed.weights.describe import ModelDescription
from tokenspeed.weights.gguf_file import GgufFile

__all__ = ["fingerprint"]

#: A tensor up to this size is digested whole: norms, biases, scales, low-rank factors.
_WHOLE = 64 << 10
#: Of a larger one: so many samples, spread evenly from its first byte to its last. Some 6,000 reads for 70 billion parameters.
_SAMPLES, _SAMPLE = 8, 4096
#: The same for a file whose tensors are not known.
_FILE_SAMPLES = 256
_LENGTH = 8  # bytes of a safetensors header's length
_HEADER = 100 << 20  # the format's own limit


def fingerprint(model: ModelDescription) -> str:
    """32 hexadecimal digits; equal for copies of one checkpoint at any place.

    What differs: any change of the configuration, of a tensor's name, type, shape or place, of a tensor up to 64 KiB, and of larger tensors what training or
    merging an adapter does, which changes elements all over a tensor, however few tensors it touches. What does not: an edit by hand of a few rows of a large
    tensor (of an embedding, say) that no sample meets. Give such a checkpoint a key of its own in its ``config.json``.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256(json.dumps(model.config, sort_keys=True, default=str).encode())
    digest.update(model.format.encode())
    for name in model.weight_files:
        path = Path(name)
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(size.to_bytes(8, "little"))
            tensors = _tensors(path, size)
            samples = _SAMPLES if tensors else _FILE_SAMPLES
            header = min(begin for begin, _ in tensors) if tensors else 0
            ranges = [(0, header)] if header else []
            for begin, end in tensors or [(0, size)]:
                ranges += _sampled(begin, end, samples)
            for begin, end in ranges:
                digest.update(os.pread(file.fileno(), end - begin, begin))
    return digest.hexdigest()[:32]


def _sampled(begin: int, end: int, samples: int) -> list[tuple[int, int]]:
    if end - begin <= max(_WHOLE, samples * _SAMPLE):
        return [(begin, end)]
    last = end - _SAMPLE
    starts = [begin + (last - begin) * index // (samples - 1) for index in range(samples)]
    return [(start, start + _SAMPLE) for start in starts]


def _tensors(path: Path, size: int) -> list[tuple[int, int]]:
    """(begin, end) of each tensor in file order; empty where the format is another one."""
    with path.open("rb") as file:
        head = file.read(_LENGTH)
        if head.startswith(b"GGUF"):
            return _gguf_tensors(path, size)
        length = int.from_bytes(head, "little")
        if not 2 <= length <= min(_HEADER, size - _LENGTH):
            return []
        try:
            header = json.loads(file.read(length))
            places = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
            base = _LENGTH + length
            return sorted((base + int(begin), base + int(end)) for begin, end in places)
        except (ValueError, TypeError, KeyError, AttributeError):
            return []


def _gguf_tensors(path: Path, size: int) -> list[tuple[int, int]]:
    try:
        with GgufFile(path) as file:
            begins = sorted(tensor.offset for tensor in file.tensors.values())
    except ModelError:
        return []
    return list(zip(begins, [*begins[1:], size], strict=True))

"""From what a user typed as MODEL to a description of the checkpoint: where it is, what it is, how to read it. Torch-free.

Accepted, tried in this order: ``toy`` (the built-in model, no files), ``package:NAME`` or ``package:NAME/FILE`` (a model file inside an installed
Python package, which is not imported), a directory in the Hugging Face layout, a GGUF file, a hub id ``owner/name``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed.errors import ConfigError, ModelError
from tokenspeed.weights.config_view import ConfigView
from tokenspeed.weights.gguf_config import gguf_to_hf_config
from tokenspeed.weights.gguf_file import GgufFile, is_gguf
from tokenspeed.weights.locate import locate
from tokenspeed.weights.toy import TOY_CONFIG, TOY_NAME

__all__ = ["LOAD_FORMATS", "ModelDescription", "describe_model"]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A checkpoint, known without loading a weight. Plain data.

    Attributes:
        name: as the user gave it.
        path: directory or file it resolved to; ``toy`` for the built-in model.
        format: ``safetensors``, ``gguf`` or ``dummy``.
        architecture: ``architectures[0]``.
        model_type: ``model_type`` of the config.
        config: ``config.json``; for a GGUF file what it implies, in the same form.
        generation: ``generation_config.json`` or empty (end-of-sequence ids, sampling defaults).
        tokenizer_path: directory with ``tokenizer.json``, GGUF file, or ``toy``.
        dtype: element type of the checkpoint: ``float32``, ``bfloat16`` or ``float16``.
        weight_files: absolute paths, in the order they are read; empty for ``dummy``.
        gguf_architecture: ``general.architecture`` of a GGUF file, otherwise empty.
    """

    name: str
    path: str
    format: str
    architecture: str
    model_type: str
    config: dict[str, Any]
    tokenizer_path: str
    dtype: str
    weight_files: tuple[str, ...]
    generation: dict[str, Any] = field(default_factory=dict)
    gguf_architecture: str = ""

    @property
    def hf_config(self) -> ConfigView:
        """The config with attribute access, as model classes take it."""
        return ConfigView(self.config)


def describe_model(model: str, load_format: str = "auto") -> ModelDescription:
    """Resolve ``model`` and read its configuration.

    Raises:
        ConfigError: ``load_format`` is unknown or contradicts what was found, or nothing is found under that name.
        ModelError: files are missing or unreadable.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"--load-format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    if model == TOY_NAME:
        return _describe_toy(load_format)
    path = locate(model)
    if path.is_dir():
        return _describe_directory(model, path, load_format)
    return _describe_gguf(model, path, load_format)


def _describe_toy(load_format: str) -> ModelDescription:
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"the built-in model {TOY_NAME!r} has no files; leave --load-format at auto")
    return ModelDescription(
        name=TOY_NAME,
        path=TOY_NAME,
        format="dummy",
        architecture=TOY_CONFIG["architectures"][0],
        model_type=TOY_CONFIG["model_type"],
        config=dict(TOY_CONFIG),
        tokenizer_path=TOY_NAME,
        dtype="float32",
        weight_files=(),
    )


def _describe_gguf(name: str, path: Path, load_format: str) -> ModelDescription:
    if not is_gguf(path):
        raise ConfigError(f"{path} is a file but not a GGUF file; give the directory of a checkpoint or a .gguf file")
    if load_format == "safetensors":
        raise ConfigError(f"{path} is a GGUF file; leave --load-format at auto or give a directory with *.safetensors")
    with GgufFile(path) as file:
        config = gguf_to_hf_config(file)
        architecture = str(file.get("general.architecture"))
    dummy = load_format == "dummy"
    return ModelDescription(
        name=name,
        path=str(path),
        format="dummy" if dummy else "gguf",
        architecture=config["architectures"][0],
        model_type=config["model_type"],
        config=config,
        tokenizer_path=str(path),
        dtype=config["torch_dtype"],
        weight_files=() if dummy else (str(path),),
        gguf_architecture=architecture,
    )


def _describe_directory(name: str, path: Path, load_format: str) -> ModelDescription:
    config_path = path / "config.json"
    if not config_path.is_file():
        candidates = sorted(path.glob("*.gguf"))
        if len(candidates) == 1 and load_format != "safetensors":
            return _describe_gguf(name, candidates[0], load_format)
        if candidates:
            raise ConfigError(
                f"{path} holds {len(candidates)} GGUF files; give one of them: {', '.join(c.name for c in candidates)}"
            )
        raise ConfigError(f"{path} has no config.json; it is not a checkpoint in the Hugging Face layout")
    if load_format == "gguf":
        raise ConfigError(
            f"{path} is a Hugging Face directory; leave --load-format at auto or give the .gguf file itself"
        )
    config = _read_json(config_path)
    _check_sizes(config, config_path)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelError(
            f'{config_path} names no "architectures"; add the model class that the checkpoint was saved from'
        )
    generation_path = path / "generation_config.json"
    return ModelDescription(
        name=name,
        path=str(path),
        format="dummy" if load_format == "dummy" else "safetensors",
        architecture=str(architectures[0]),
        model_type=str(config.get("model_type", "")),
        config=config,
        generation=_read_json(generation_path) if generation_path.is_file() else {},
        tokenizer_path=str(path),
        dtype=_dtype_of(config, config_path),
        weight_files=() if load_format == "dummy" else _safetensors_files(path),
    )


def _check_sizes(config: dict[str, Any], where: Path) -> None:
    """Numbers that sizes are computed from, where they are stated: a zero or a text would end as a traceback far from here."""
    nested = config.get("text_config")
    for name in _SIZES:
        for table in (config, nested if isinstance(nested, dict) else {}):
            value = table.get(name)
            if value is not None and (type(value) is not int or value < 1):
                raise ModelError(f"{where}: {name} is {value!r}; it must be a whole number from 1 on")


def _dtype_of(config: dict[str, Any], where: Path) -> str:
    text = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(text).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"{where}: dtype {text!r} is not one of float32, bfloat16, float16")
    return name


def _safetensors_files(path: Path) -> tuple[str, ...]:
    index_path = path / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index_path} has no weight_map; download it again")
        names = sorted(set(map(str, weight_map.values())))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(f"{index_path} names a file outside its directory: {outside[0]}")
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ModelError(
                f"{path} lacks {len(missing)} of {len(names)} shards that its index names, for example {missing[0]}; download them again"
            )
        return tuple(str(path / name) for name in names)
    files = sorted(path.glob("*.safetensors"))
    if files:
        return tuple(map(str, files))
    if any(path.glob("*.bin")) or any(path.glob("*.pt")):
        raise ModelError(
            f"{path} holds only pickled weights (*.bin, *.pt), which are not read; convert them to safetensors"
        )
    raise ModelError(f"{path} holds no *.safetensors; --load-format dummy runs the architecture with random weights")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value

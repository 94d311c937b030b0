"""What MODEL may be, and what is said when it is something else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tokenspeed.errors import ConfigError, ModelError
from tokenspeed.weights.describe import describe_model
from tokenspeed.weights.toy import TOY_CONFIG, build_toy_tokenizer

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": 8}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_a_directory(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    described = describe_model(str(directory))
    assert (described.format, described.architecture, described.model_type, described.dtype) == (
        "safetensors",
        "LlamaForCausalLM",
        "llama",
        "bfloat16",
    )
    assert described.weight_files == (str(directory / "model.safetensors"),)
    assert described.generation == {"eos_token_id": [1, 2]}
    assert described.hf_config.hidden_size == 8


def test_shards_come_from_the_index(directory: Path) -> None:
    weight_map = {"a": "m-2.safetensors", "b": "m-1.safetensors", "c": "m-1.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "m-1.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"lacks 1 of 2 shards.*m-2\.safetensors"):
        describe_model(str(directory))
    (directory / "m-2.safetensors").write_bytes(b"")
    assert [Path(f).name for f in describe_model(str(directory)).weight_files] == ["m-1.safetensors", "m-2.safetensors"]


def test_an_index_cannot_reach_outside_its_directory(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(ModelError, match="outside its directory"):
        describe_model(str(directory))


def test_dummy_needs_no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    assert describe_model(str(directory), "dummy").weight_files == ()
    with pytest.raises(ModelError, match="--load-format dummy"):
        describe_model(str(directory))


def test_pickled_weights_are_not_read(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        describe_model(str(directory))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read"),
        ("[1]", "not a JSON object"),
        ("{}", 'names no "architectures"'),
        ('{"architectures": ["A"], "dtype": "int8"}', "'int8' is not one of"),
    ],
)
def test_a_config_that_cannot_be_used(directory: Path, content: str, message: str) -> None:
    (directory / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        describe_model(str(directory))


def test_the_toy_has_no_files() -> None:
    described = describe_model("toy")
    assert (described.format, described.architecture, described.path) == ("dummy", "ToyForCausalLM", "toy")
    assert described.config["vocab_size"] == build_toy_tokenizer().get_vocab_size()
    with pytest.raises(ConfigError, match="no files"):
        describe_model("toy", "gguf")
    assert described.config == TOY_CONFIG


def test_toy_tokens_are_bytes() -> None:
    tokenizer = build_toy_tokenizer()
    text = "héllo\n\x00 🎉"
    ids = tokenizer.encode(text).ids
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|im_end|>").ids == [259]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "no model given"),
        ("./nowhere", "no such file or directory"),
        ("package:no_such_package_here", "no package of that name is installed"),
        ("package:sys", "not a package with files"),
    ],
)
def test_what_is_not_found_is_named(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe_model(model)


def test_a_hub_id_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *a, **k: (_ for _ in ()).throw(OSError("Got: name not known"))
    )
    with pytest.raises(
        ConfigError, match=r"'some-owner/some-model'.* from the hub: name not known.*give the directory"
    ):
        describe_model("some-owner/some-model")


def test_a_package_is_searched_but_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "holds_models"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "inner" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert describe_model("package:holds_models", "dummy").path == str(package / "inner")
    (package / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError, match=r"holds 2 models.*package:holds_models/inner"):
        describe_model("package:holds_models", "dummy")
    assert describe_model("package:holds_models/inner", "dummy").path == str(package / "inner")
    with pytest.raises(ConfigError, match=r"holds no '\.\./x'"):
        describe_model("package:holds_models/../x", "dummy")


def test_formats_that_contradict_what_is_there(directory: Path) -> None:
    with pytest.raises(ConfigError, match="leave --load-format at auto"):
        describe_model(str(directory), "gguf")
    with pytest.raises(ConfigError, match="'pt' is not one of"):
        describe_model(str(directory), "pt")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        describe_model(str(directory / "config.json"))


def test_describing_imports_no_torch() -> None:
    code = "import sys; from tokenspeed.weights import describe, gguf_tokenizer, toy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(("key", "value"), [("num_attention_heads", 0), ("hidden_size", "x"), ("vocab_size", 1.5)])
def test_a_size_that_is_no_count_is_named(directory: Path, key: str, value: object) -> None:
    for config in (CONFIG | {key: value}, CONFIG | {"text_config": {key: value}}):
        (directory / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=rf"config\.json: {key} is {value!r}"):
            describe_model(str(directory))


def test_what_holds_no_model_is_a_wrong_setting(tmp_path: Path) -> None:
    """Bad input, like a directory that does not exist: the command line exits with 2."""
    for model, message in (
        (str(tmp_path), "no config.json"),
        ("package:json", "neither"),
        ("package:", "package:NAME"),
    ):
        with pytest.raises(ConfigError, match=message):
            describe_model(model)

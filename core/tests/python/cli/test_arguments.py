"""Flags, the environment and config files become settings; nothing that cannot be honoured is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenspeed.cli import arguments
from tokenspeed.cli.arguments import Parser, add_engine_arguments, add_serving_arguments, engine_config, serving_config
from tokenspeed.cli.flags import ENGINE_FLAGS, SERVING_FLAGS
from tokenspeed.config import EngineConfig, ParallelConfig, ServingConfig
from tokenspeed.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENSPEED_PLUGINS", raising=False)
    monkeypatch.delenv("TOKENSPEED_API_KEY", raising=False)


def configs(*args: str) -> tuple[EngineConfig, ServingConfig]:
    parser = Parser(prog="tokenspeed serve")
    add_serving_arguments(parser, add_engine_arguments(parser))
    parsed = parser.parse(args)
    return engine_config(parsed), serving_config(parsed)


def test_the_start_command_of_the_upstream_documentation_parses() -> None:
    engine, serving = configs(
        "openai/gpt-oss-20b", "--host", "0.0.0.0", "--port", "8000", "--tensor-parallel-size", "1"
    )
    assert engine == EngineConfig(model="openai/gpt-oss-20b")
    assert serving == ServingConfig(host="0.0.0.0", port=8000, served_model_name=("openai/gpt-oss-20b",))


def test_defaults_are_those_of_the_configs() -> None:
    engine, serving = configs("m")
    assert engine == EngineConfig(model="m")
    assert serving == ServingConfig(served_model_name=("m",))


def test_a_name_or_key_that_is_given_twice_is_one() -> None:
    _, serving = configs("m", "--served-model-name", "a", "b", "a", "--api-key", "k", "k")
    assert (serving.served_model_name, serving.api_key) == (("a", "b"), ("k",))


def test_every_setting_has_a_flag_of_its_name() -> None:
    """A setting without a flag cannot be reached; a flag without a setting would be dropped."""
    flags = {flag.field for flag in (*ENGINE_FLAGS, *SERVING_FLAGS)}
    fields = {
        f.name for config in (EngineConfig, ServingConfig, ParallelConfig) for f in msgspec.structs.fields(config)
    }
    elsewhere = {
        "model",
        "model_path",
        "served_model_name",
        "parallel",
        "plugins",
        "plugin_options",
        "kernel_overrides",
    }
    assert fields - elsewhere == flags


def test_every_flag_stands_in_the_help_with_its_default() -> None:
    parser = Parser(prog="tokenspeed serve")
    add_serving_arguments(parser, add_engine_arguments(parser))
    text = parser.format_help()
    for flag in (*ENGINE_FLAGS, *SERVING_FLAGS):
        assert f"--{flag.name}" in text
    assert "default: 8000" in text


MANY = """
m --max-model-len 4096 --max-num-seqs 8 --chunked-prefill-size 64 --max-total-tokens 9999 --block-size 32 --dtype half
--device cpu --attention-backend sdpa --plugins +a,-b --set x.n=1 --set y.m=a=b --kernel norm.rms_norm=torch
--no-enable-prefix-caching --disable-overlap-schedule --seed 7 -tp 2 --kv-cache-dtype float32 --max-step-ms 12.5
--served-model-name one two --api-key k1 k2 --api-key k3 --tool-call-parser none --enable-log-request-stats
--max-body-bytes 2M --control-port 9001
"""


def test_many_flags_at_once() -> None:
    engine, serving = configs(*MANY.split())
    assert engine == EngineConfig(
        model="m",
        max_model_len=4096,
        max_num_seqs=8,
        chunked_prefill_size=64,
        max_total_tokens=9999,
        block_size=32,
        dtype="float16",
        device="cpu",
        attention_backend="sdpa",
        plugins="+a,-b",
        plugin_options={"x.n": "1", "y.m": "a=b"},
        kernel_overrides={"norm.rms_norm": "torch"},
        enable_prefix_caching=False,
        disable_overlap_schedule=True,
        seed=7,
        kv_cache_dtype="float32",
        max_step_ms=12.5,
        served_model_name=("one", "two"),
        parallel=ParallelConfig(tensor_parallel_size=2, world_size=2),
    )
    assert serving == ServingConfig(
        served_model_name=("one", "two"),
        api_key=("k1", "k2", "k3"),
        tool_call_parser=None,
        enable_log_request_stats=True,
        max_body_bytes=2 * 1024 * 1024,
        control_port=9001,
    )


@pytest.mark.parametrize(
    ("alias", "field"), [("--max-num-batched-tokens", "chunked_prefill_size"), ("--page-size", "block_size")]
)
def test_aliases(alias: str, field: str) -> None:
    assert getattr(configs("m", alias, "64")[0], field) == 64


@pytest.mark.parametrize(
    ("args", "accepted"),
    [
        (("--pipeline-parallel-size", "2"), ("--pipeline-parallel-size", "1")),
        (("--data-parallel-size", "4"), ("-dp", "1")),
        (("--expert-parallel-size", "2"), ("--ep-size", "1")),
        (("--decode-context-parallel-size", "2"), ("--cp-size", "1")),
        (("--nnodes", "2"), ("--nnodes", "1")),
        (("--node-rank", "1"), ("--node-rank", "0")),
        (("--enable-expert-parallel",), ()),
        (("--quantization", "awq"), ()),
        (("--model", "x"), ()),
        (("--generation-config", "auto"), ("--generation-config", "vllm")),
        (("--swap-space", "4"), ("--swap-space", "0")),
        (("--enable-lora",), ("--enable-chunked-prefill", "--disable-log-requests", "--disable-log-stats")),
        (("--speculative-config", "{}"), ("--model-impl", "auto")),
    ],
)
def test_what_does_not_work_is_refused_by_its_name(args: tuple[str, ...], accepted: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        configs("m", *args)
    assert str(error.value).startswith(args[0])
    assert configs("m", *accepted)[0] == EngineConfig(model="m")


@pytest.mark.parametrize("flag", ["--trust-remote-code", "--enable-auto-tool-choice"])
def test_flags_of_common_command_lines_that_change_nothing_are_taken(flag: str) -> None:
    field = flag.removeprefix("--").replace("-", "_")
    assert configs("m", flag)[0] == EngineConfig(model="m", **{field: True})


@pytest.mark.parametrize(
    "args",
    [
        ("--port", "65536"),
        ("--port", "-1"),
        ("--port", "http"),
        ("--max-model-len", "0"),
        ("--gpu-memory-utilization", "1.1"),
        ("--gpu-memory-utilization", "0"),
        ("--gpu-memory-utilization", "nan"),
        ("--max-step-ms", "inf"),
        ("--dtype", "int8"),
        ("--load-format", "pickle"),
        ("--kv-cache-memory-bytes", "4Q"),
        ("--log-level", "loud"),
        ("--tensor-parallel-size", "0"),
        ("--drain-timeout-s", "-1"),
    ],
)
def test_a_bad_value_exits_with_2_naming_the_flag(args: tuple[str, ...], capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit_:
        configs("m", *args)
    assert exit_.value.code == 2
    assert args[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no model is given"),
        (("m", "--set", "x"), "write PLUGIN.OPTION=VALUE"),
        (("m", "--kernel", "x"), "FAMILY.MODE=SOLUTION"),
    ],
)
def test_a_missing_model_or_malformed_pair_is_refused(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configs(*args)


YAML = """
model: /models/m
max-model-len: 4096
max_num_seqs: 8
dtype: bfloat16
host: 0.0.0.0
enable-prefix-caching: false
served-model-name: [a, b]
api-key: secret
tensor-parallel-size: 2
plugins: [+x, -y]
kv-cache-memory-bytes: 2G
tool-call-parser: none
seed: null
plugin_options:
  flashinfer: {workspace_mb: 512}
  kernels-cpu.fast: true
kernel:
  norm.rms_norm: torch
"""
JSON = """{"model": "/models/m", "max-model-len": 4096, "max_num_seqs": 8, "dtype": "bfloat16", "host": "0.0.0.0",
"enable_prefix_caching": false, "served_model_name": ["a", "b"], "api_key": ["secret"], "tensor_parallel_size": 2, "plugins": "+x,-y",
"kv_cache_memory_bytes": 2147483648, "tool_call_parser": "none", "set": ["flashinfer.workspace_mb=512", "kernels-cpu.fast=true"],
"kernel_overrides": {"norm": {"rms_norm": "torch"}}}"""
TOML = """
model = "/models/m"
max-model-len = 4096
max-num-seqs = 8
dtype = "bfloat16"
host = "0.0.0.0"
enable-prefix-caching = false
served-model-name = ["a", "b"]
api-key = "secret"
tensor-parallel-size = 2
plugins = "+x,-y"
kv-cache-memory-bytes = "2G"
tool-call-parser = "none"
[set]
flashinfer.workspace_mb = 512
kernels-cpu.fast = true
[kernel]
norm.rms_norm = "torch"
"""


def write(folder: Path, suffix: str, text: str) -> str:
    path = folder / f"settings.{suffix}"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("suffix", "text"), [("yaml", YAML), ("json", JSON), ("toml", TOML)])
def test_a_config_file_says_what_flags_say(tmp_path: Path, suffix: str, text: str) -> None:
    engine, serving = configs("--config", write(tmp_path, suffix, text))
    assert engine == EngineConfig(
        model="/models/m",
        max_model_len=4096,
        max_num_seqs=8,
        dtype="bfloat16",
        enable_prefix_caching=False,
        served_model_name=("a", "b"),
        plugins="+x,-y",
        kv_cache_memory_bytes=2 << 30,
        plugin_options={"flashinfer.workspace_mb": "512", "kernels-cpu.fast": "true"},
        kernel_overrides={"norm.rms_norm": "torch"},
        parallel=ParallelConfig(tensor_parallel_size=2, world_size=2),
    )
    assert serving == ServingConfig(
        host="0.0.0.0", api_key=("secret",), served_model_name=("a", "b"), tool_call_parser=None
    )


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = write(tmp_path, "yaml", "plugins: from-file\nport: 1\napi-key: file\nset: {p.a: 1, p.b: 1}")
    assert configs("m", "--config", path)[0].plugins == "from-file"
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "from-env")
    monkeypatch.setenv("TOKENSPEED_API_KEY", "env")
    engine, serving = configs("m", "--config", path)
    assert (engine.plugins, serving.api_key, serving.port) == ("from-env", ("env",), 1)
    engine, serving = configs(
        "m", "--config", path, "--plugins", "", "--api-key", "flag", "--port", "2", "--set", "p.b=2"
    )
    assert (engine.plugins, serving.api_key, serving.port) == ("", ("flag",), 2)
    assert engine.plugin_options == {"p.a": "1", "p.b": "2"}


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [
        ("yaml", "max-modl-len: 1", "did you mean 'max_model_len'"),
        ("yaml", "port: 1\nport: 2", "'port' is given twice"),
        ("json", '{"port": 1, "port": 2}', "'port' is given twice"),
        ("toml", "port = 1\nport = 2", "settings.toml"),
        ("yaml", "- 1", "one table of settings"),
        ("yaml", "port: [1]", "is not one value"),
        ("yaml", "port: {a: 1}", "is not one value"),
        ("yaml", "port: true", "is not one value"),
        ("yaml", "port: 99999", "port: 99999 is above 65535"),
        ("yaml", "dtype: int8", "not one of auto"),
        ("yaml", "enable-prefix-caching: 'yes'", "is not true or false"),
        ("yaml", "a: [", "settings.yaml"),
        ("json", "{", "settings.json"),
        ("json", "[" * 100_000, "nested too deeply"),
        ("yaml", "[" * 3_000, "nested too deeply"),
        ("ini", "", "must end in .yaml"),
        ("yaml", "!!python/object/apply:os.getpid []", "could not determine a constructor"),
    ],
)
def test_a_bad_config_file_is_refused_naming_file_and_key(tmp_path: Path, suffix: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        configs("m", "--config", write(tmp_path, suffix, text))
    assert message in str(error.value)


def test_a_missing_config_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        configs("m", "--config", "nowhere.yaml")


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert configs("m", "--config", write(tmp_path, "yaml", ""))[0] == EngineConfig(model="m")


def test_the_environment_is_named_as_the_source_of_a_bad_plugin_list(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "ghost")
    outcome = run("plugins", "list")
    assert outcome.code == 2
    assert outcome.err.startswith("tokenspeed: TOKENSPEED_PLUGINS: no plugin named 'ghost'")


def test_module_exports_what_commands_use() -> None:
    assert set(arguments.__all__) >= {
        "add_engine_arguments",
        "add_serving_arguments",
        "engine_config",
        "serving_config",
    }


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name"])
def test_an_empty_key_or_name_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}.*empty"):
        configs("m", flag, "")


def test_an_empty_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither no protection, which the operator did not mean, nor a key that everybody knows."""
    monkeypatch.setenv("TOKENSPEED_API_KEY", "")
    with pytest.raises(ConfigError, match=r"TOKENSPEED_API_KEY.*empty"):
        configs("m")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--num-threads", "100000000"), "--num-threads: 100000000 is above 1024 (accepted: 0 to 1024)"),
        (("--kv-cache-memory-bytes", "4Q"), "K, M, G or T"),
        (
            ("--kvstore-size", "-5G"),
            "--kvstore-size: '-5G' is below 1 byte; write bytes, or a whole number of K, M, G or T",
        ),
        (("--kvstore-ratio", "-1e3"), "--kvstore-ratio: -1e3 must be at least 0"),
        (("--session-retain-percent", "-.5"), "--session-retain-percent: '-.5' is not a whole number"),
        (("--seed", "-tp"), "--seed: expected one argument; a value that begins with - follows"),
        (("--kvstore-size=-5G", "--seed=1"), "--kvstore-size: '-5G' is below 1 byte"),
        (("--kvstore-size", "0"), "--kvstore-size: 0 is below 1; write bytes"),
        (("--kvstore-ratio", "inf"), "--kvstore-ratio: inf is not a finite number"),
        (("--kvstore-ratio", "nan"), "--kvstore-ratio: nan is not a finite number"),
        (("--drain-timeout-s", "1e20"), "--drain-timeout-s: 1e20 is above 604800"),
        (("--max-n", "9" * 20), "--max-n: 99999999999999999999 is above 9223372036854775807"),
        (("--max-logprobs", "9" * 20), "--max-logprobs: 99999999999999999999 is above 9223372036854775807"),
        (("--max-pending-requests", "9" * 20), "--max-pending-requests: 99999999999999999999 is above"),
        (("--max-body-bytes", "9" * 20), "--max-body-bytes: '99999999999999999999' is above"),
        (("--max-body-bytes", "9" * 12 + "T"), "--max-body-bytes: '999999999999T' is above 9223372036854775807"),
        (("--kvstore-write-policy", "write-trough"), "invalid choice: 'write-trough'; did you mean 'write-through'"),
    ],
)
def test_numbers_that_no_machine_takes_are_refused(
    args: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        configs("m", *args)
    assert end.value.code == 2
    assert message in capsys.readouterr().err

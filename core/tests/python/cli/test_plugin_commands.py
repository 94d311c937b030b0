"""``tokenspeed plugins``, ``explain`` and ``kernels`` as a user sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PARSER = """
@hookimpl
def tokenspeed_tool_parsers():
    return [ToolParserSpec(name="demo", target="demo_parser:Demo", requires=("a-package-nobody-has",), description="a demonstration")]
@hookimpl
def tokenspeed_options():
    return [OptionSpec(name="depth", type=int, default=3, help="how deep")]
@hookimpl
def tokenspeed_doctor(context):
    return [DoctorFinding(status="warning", what=f"depth {context.options['depth']}", advice="go deeper")]
"""


@pytest.fixture
def demo(folder: Any) -> Any:
    folder.add("demo", PARSER, modules={"demo_parser": "class Demo: pass"})
    return folder


def test_list_shows_every_plugin_with_its_state(run: Any, demo: Any) -> None:
    demo.add("sick", "import module_nobody_has")
    outcome = run("plugins", "list")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["PLUGIN", "VERSION", "STATE", "CONTRIBUTES"]
    assert any(line.split()[:3] == ["demo", "1.0", "unusable"] and "tool_parser demo" in line for line in lines)
    assert any(line.split()[:3] == ["sick", "1.0", "broken"] for line in lines)
    assert "demo is not usable here: requires a-package-nobody-has (not installed)" in lines
    assert "sick is broken: ModuleNotFoundError: No module named 'module_nobody_has'" in lines


def test_list_as_json(run: Any, demo: Any) -> None:
    plain = json.loads(run("plugins", "list", "--json").out)
    (found,) = [plugin for plugin in plain["plugins"] if plugin["name"] == "demo"]
    assert (found["distribution"], found["status"], found["first_party"]) == ("dist-demo", "unusable", False)
    assert found["cause"] == found["contributions"][0]["off"] == "requires a-package-nobody-has (not installed)"
    assert plain["shadowed"] == []


PLATFORM = """
@hookimpl
def tokenspeed_platforms():
    return [PlatformSpec(name="tpu", target="tpu_probe:Tpu", detect="tpu_probe:detect", device_type="tpu")]
@hookimpl
def tokenspeed_attention_backends():
    return [AttentionBackendSpec(name="tall", target="tpu_probe:Tall", platforms=("tpu",)), AttentionBackendSpec(name="wide", target="tpu_probe:Wide")]
"""
ROWS = """
@hookimpl
def tokenspeed_kernels():
    return [KernelSpec(name="r", family="norm", mode="rms_norm", target="m:k", platforms=("tpu",))]
"""
AWAY = "runs on tpu, which no active plugin finds here"


@pytest.mark.parametrize(
    ("probe", "fault"),
    [
        ("return None", "finds no such device here"),
        ("raise OSError('no driver')", "detection failed: OSError: no driver"),
        ("return 'one TPU'", ""),
    ],
)
def test_what_a_device_is_missing_for_is_listed_as_such(run: Any, folder: Any, probe: str, fault: str) -> None:
    """A platform without its device, and what runs on that platform only; what runs anywhere stays usable."""
    folder.add("hw", PLATFORM, modules={"tpu_probe": f"def detect():\n    {probe}\nclass Tall: pass\nclass Wide: pass"})
    folder.add("rows", ROWS)
    plain = {plugin["name"]: plugin for plugin in json.loads(run("plugins", "list", "--json").out)["plugins"]}
    off = {c["name"]: c["off"] for c in plain["hw"]["contributions"]}
    assert off == {"tpu": fault, "tall": AWAY if fault else "", "wide": ""}
    states = (plain["hw"]["status"], plain["rows"]["status"])
    assert states == (("partial", "unusable") if fault else ("active", "active"))
    text = run("plugins", "list").out
    if fault:
        assert f"hw is usable in part: platform tpu: {fault}; attention_backend tall: {AWAY}" in text
        assert f"rows is not usable here: {AWAY}" in text
        assert f"warning  rows: {AWAY}" in run("plugins", "doctor").out
        assert f"usable in part: platform tpu: {fault}" in run("plugins", "show", "hw").out
    else:
        assert "hw is" not in text


def test_list_tells_what_is_used_only_when_it_is_asked_for(run: Any, folder: Any) -> None:
    folder.add(
        "extra", "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='x', target='m:X')]"
    )
    lines = [" ".join(line.split()) for line in run("plugins", "list").out.splitlines()]
    assert "extra 1.0 active (when asked) tool_parser x" in lines
    lines = [" ".join(line.split()) for line in run("plugins", "list", "--plugins", "+extra").out.splitlines()]
    assert "extra 1.0 active (named) tool_parser x" in lines


def test_show_tells_the_further_names_that_a_flag_takes(run: Any, folder: Any) -> None:
    folder.add(
        "many",
        "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='long_name', target='m:X', aliases=('short', 'old'))]",
    )
    text = run("plugins", "show", "many").out
    assert "aliases       short, old" in text
    assert "priority" not in text, "parsers are not ranked"
    for command in (("plugins", "show", "many", "--json"), ("plugins", "list", "--json")):
        plain = json.loads(run(*command).out)
        (shown,) = [p for p in plain.get("plugins", [plain]) if p["name"] == "many"]
        assert shown["contributions"][0]["aliases"] == ["short", "old"]


@pytest.mark.parametrize(
    ("plugin", "alias"),
    [
        ("parsers-kimi", "kimik2"),
        ("parsers-glm", "glm45_moe"),
        ("parsers-hermes", "qwen"),
        ("parsers-deepseek", "deepseek31"),
    ],
)
def test_names_that_other_servers_use_are_shown(run: Any, plugin: str, alias: str) -> None:
    pytest.importorskip(f"tokenspeed_plugin_{plugin.replace('-', '_')}", reason=f"{plugin} is not installed")
    outcome = run("plugins", "show", plugin)
    assert any(alias in line.split("aliases")[-1] for line in outcome.out.splitlines() if "aliases" in line)


def test_a_typo_exits_with_2_naming_the_nearest_and_where_it_looked(run: Any, demo: Any) -> None:
    for command in (("plugins", "list"), ("explain", "toy"), ("kernels", "list")):
        outcome = run(*command, "--plugins", "dem")
        assert outcome.code == 2
        assert "did you mean 'demo'?" in outcome.err
        assert str(demo.path) in outcome.err


def test_none_lists_others_as_inactive(run: Any, demo: Any) -> None:
    plain = json.loads(run("plugins", "list", "--plugins", "none", "--json").out)
    states = {plugin["name"]: plugin["status"] for plugin in plain["plugins"]}
    assert states.pop("builtin") == "active"
    assert set(states.values()) == {"inactive"}


def test_show_tells_contributions_options_and_what_is_missing(run: Any, demo: Any) -> None:
    text = run("plugins", "show", "demo", "--set", "demo.depth=9").out
    for phrase in (
        "dist-demo",
        "tool_parser demo",
        "demo_parser:Demo",
        "a demonstration",
        "not installed",
        "option demo.depth (int) = 9",
    ):
        assert phrase in text
    plain = json.loads(run("plugins", "show", "demo", "--json").out)
    assert plain["options"] == [{"name": "depth", "type": "int", "default": 3, "value": 3, "help": "how deep"}]


def test_show_prints_where_a_broken_plugin_broke(run: Any, folder: Any) -> None:
    folder.add("sick", "raise OSError('no disk')")
    text = run("plugins", "show", "sick").out
    assert "broken: OSError: no disk" in text
    assert "sick_plugin.py" in text


def test_show_of_an_unknown_plugin_names_the_nearest(run: Any, demo: Any) -> None:
    outcome = run("plugins", "show", "demmo")
    assert outcome.code == 2
    assert "did you mean 'demo'?" in outcome.err


def test_doctor_collects_what_is_wrong_and_what_plugins_say(run: Any, demo: Any) -> None:
    demo.add(
        "lost",
        "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='lost', target='module_nobody_has:X')]",
    )
    demo.add(
        "rival",
        "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='x', aliases=('demo',), target='demo_parser:Demo')]",
    )
    demo.add("sick", "raise OSError('no disk')")
    outcome = run("plugins", "doctor", "--set", "demo.depth=9")
    assert outcome.code == 1
    for phrase in (
        "warning  demo: depth 9",
        "warning  demo: tool_parser demo requires a-package-nobody-has (not installed)",
        "tool_parser demo belongs to demo:demo and rival:x",
        "error    lost: tool_parser lost: there is no module module_nobody_has",
        "error    sick: OSError: no disk",
    ):
        assert phrase in outcome.out
    assert run("plugins", "doctor", "demo").code == 0
    two = run("plugins", "doctor", "sick", "demo", "--json")
    assert {finding["plugin"] for finding in json.loads(two.out)} == {"sick", "demo"}
    assert run("plugins", "doctor", "demo", "demmo").code == 2


def test_doctor_tells_a_third_party_that_its_name_means_a_first_party_plugin(run: Any, folder: Any) -> None:
    kernel = "KernelSpec(name='torch', family='norm', mode='rms_norm', target='acme_kernels:rms')"
    folder.add(
        "acme",
        f"@hookimpl\ndef tokenspeed_kernels():\n    return [{kernel}]",
        modules={"acme_kernels": "def rms(x): return x"},
    )
    outcome = run("plugins", "doctor", "acme")
    assert outcome.out.splitlines() == [
        "warning  acme: kernel norm.rms_norm=torch of acme:torch means builtin:torch, which is first-party",
        "           write acme:torch for this one",
    ]
    assert run("plugins", "doctor", "builtin").out.startswith("ok ")


def test_doctor_tells_of_parts_that_a_model_names_and_nobody_has(run: Any, folder: Any) -> None:
    parts = "tool_parser='acne', reasoning_parser='acme-thought', attention_backend='torch'"
    folder.add(
        "acme",
        "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='acme', target='acme_parts:P')]\n"
        "@hookimpl\ndef tokenspeed_models():\n"
        f"    return [ModelSpec(name='m', target='acme_parts:P', architectures=('AForCausalLM',), {parts})]",
        modules={"acme_parts": "class P: pass"},
    )
    outcome = run("plugins", "doctor", "acme", "--plugins", "acme")
    assert outcome.out.splitlines() == [
        "warning  acme: model m names tool_parser acne, which no active plugin has",
        "           no installed plugin has one of that name; did you mean 'acme'? --tool-call-parser NAME takes another",
        "warning  acme: model m names reasoning_parser acme-thought, which no active plugin has",
        "           no installed plugin has one of that name; --reasoning-parser NAME takes another",
    ]


def test_doctor_imports_what_a_user_could_select(run: Any, folder: Any) -> None:
    folder.add(
        "deep",
        "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='deep', target='deep_parser:Deep'),"
        " ToolParserSpec(name='gone', target='sound_parser:Gone')]",
        modules={"deep_parser": "import module_nobody_has", "sound_parser": ""},
    )
    outcome = run("plugins", "doctor", "deep")
    assert outcome.code == 1
    assert "tool_parser deep: ModuleNotFoundError: No module named 'module_nobody_has'" in outcome.out
    assert "tool_parser gone: AttributeError: module 'sound_parser' has no attribute 'Gone'" in outcome.out


def test_shadowed_copies_are_named(run: Any, folder: Any) -> None:
    folder.add("demo", "", version="1.0")
    folder.add("demo", "", version="2.0")
    assert "dist-demo 1.0 in" in run("plugins", "list").out
    assert "is never used" in run("plugins", "doctor", "demo").out


def test_plug_04_a_parser_of_a_plugin_is_known_to_every_command_that_takes_its_flag(run: Any, folder: Any) -> None:
    folder.add(
        "demo", "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='demo', target='m:X')]"
    )
    outcome = run("explain", "toy", "--device", "cpu", "--tool-call-parser", "demo")
    assert outcome.code == 0
    assert "demo:demo 1.0 (--tool-call-parser demo)" in outcome.out
    outcome = run("explain", "toy", "--device", "cpu", "--tool-call-parser", "demmo")
    assert outcome.code == 2
    assert "did you mean 'demo'?" in outcome.err


def test_explain_shows_the_built_ins_alone(run: Any) -> None:
    outcome = run("explain", "toy", "--plugins", "none", "--device", "cpu")
    assert outcome.code == 0
    assert "builtin:toy" in outcome.out
    plan = json.loads(run("explain", "toy", "--plugins", "none", "--device", "cpu", "--json").out)["plan"]
    assert [plugin["name"] for plugin in plan["plugins"]] == ["builtin"]


def test_explain_tells_what_serve_would_warn_of(run: Any, folder: Any, tmp_path: Path) -> None:
    """A template that reads no tools beside a tool parser; in JSON too."""
    folder.add(
        "demo", "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='demo', target='m:X')]"
    )
    asked = ("explain", "toy", "--device", "cpu", "--tool-call-parser", "demo")
    warned = "the chat template does not read tools"
    assert f"  warning           {warned}" in run(*asked).out
    assert json.loads(run(*asked, "--json").out)["warnings"][0].startswith(warned)
    assert warned not in run("explain", "toy", "--device", "cpu", "--tool-call-parser", "none").out
    template = tmp_path / "reads.jinja"
    template.write_text("{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}")
    assert warned not in run(*asked, "--chat-template", str(template)).out
    lost = run(*asked, "--chat-template", str(tmp_path / "lost.jinja"))
    assert (lost.code, "serve would end for want of a tokenizer: --chat-template" in lost.out) == (0, True)


def test_the_options_of_the_built_in_store_are_shown_where_it_is_used(run: Any) -> None:
    """Every option of the built-ins is one of that store."""
    asked = ("explain", "toy", "--device", "cpu", "--plugins", "none")
    assert "memory_store_mb" not in run(*asked).out
    used = run(*asked, "--kvstore", "memory").out
    assert "options           builtin: memory_store_mb=1024\n" in used


STORE = """
@hookimpl
def tokenspeed_kv_stores():
    return [KVStoreSpec(name="shelf", target="shelf_parts:Shelf", checker="shelf_parts:check")]
@hookimpl
def tokenspeed_options():
    return [OptionSpec(name="place", type=str, default="", help="where")]
"""
SHELF = """
from tokenspeed.errors import ConfigError
class Shelf: pass
def check(options):
    if options["place"] == "crash": raise OSError("no shelf")
    if not options["place"]: raise ConfigError("give a place with --set shelf.place=WHERE")
"""


def test_explain_and_doctor_know_what_a_store_cannot_start_without(run: Any, folder: Any) -> None:
    folder.add("shelf", STORE, modules={"shelf_parts": SHELF})
    asked = ("explain", "toy", "--device", "cpu", "--kvstore", "shelf")
    refused = run(*asked)
    assert (refused.code, refused.err.strip()) == (2, "tokenspeed: give a place with --set shelf.place=WHERE")
    assert "shelf:shelf 1.0" in run(*asked, "--set", "shelf.place=here").out
    told = run("plugins", "doctor", "shelf")
    assert told.code == 0
    assert "warning  shelf: kv_store shelf cannot start as it is: give a place with --set" in told.out
    assert "ok       shelf" in run("plugins", "doctor", "shelf", "--set", "shelf.place=here").out
    broken = run("plugins", "doctor", "shelf", "--set", "shelf.place=crash")
    assert broken.code == 1
    assert "error    shelf: kv_store shelf: its checker raised OSError: no shelf" in broken.out


def test_explain_of_the_file_store_without_its_directory_exits_as_serve_does(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("tokenspeed_plugin_kvstore_file", reason="kvstore-file is not installed")
    asked = ("explain", "toy", "--device", "cpu", "--kvstore", "file")
    refused = run(*asked)
    assert refused.code == 2
    assert "give a directory with --set kvstore-file.directory=PATH" in refused.err
    assert run(*asked, "--set", f"kvstore-file.directory={tmp_path / 'pages'}").code == 0
    assert not (tmp_path / "pages").exists(), "explain makes nothing"


def test_what_a_flag_names_and_cannot_run_is_a_wrong_setting(run: Any, folder: Any) -> None:
    """As a name that nobody has is: both exit with 2."""
    folder.add(
        "far",
        "@hookimpl\ndef tokenspeed_attention_backends():\n    return [AttentionBackendSpec(name='far', target='m:F', platforms=('tpu',))]",
    )
    outcome = run("explain", "toy", "--device", "cpu", "--attention-backend", "far")
    assert outcome.code == 2
    assert "far:far (--attention-backend far) cannot be used: runs on tpu, not on cpu" in outcome.err


def test_explain_of_an_architecture_that_nobody_serves_says_how_to_get_it(run: Any, tmp_path: Any) -> None:
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    outcome = run("explain", str(tmp_path), "--load-format", "dummy", "--device", "cpu", "--plugins", "none")
    assert outcome.code == 1
    assert "no installed plugin serves architecture GptOssForCausalLM" in outcome.err
    assert "pip install tokenspeed-plugin-models-gpt-oss" in outcome.err


KERNELS = """
@hookimpl
def tokenspeed_kernels():
    return [KernelSpec(name="h100", family="norm", mode="rms_norm", target="m:k", platforms=("cuda",), capability=((9, 0), (9, 0)),
                       dtypes=("bf16",), priority=Priority.SPECIALIZED)]
"""


ON_CUDA = "kernels explain norm.rms_norm --plugins k --platform cuda --dtype bf16"


def test_kernels_list_and_explain_without_the_device(run: Any, folder: Any) -> None:
    folder.add("k", KERNELS)
    assert "k:h100" in run("kernels", "list", "norm", "--plugins", "k").out
    listed = json.loads(run("kernels", "list", "norm.rms_norm", "--plugins", "k", "--json").out)
    assert [one["capability"] for one in listed if one["name"] == "k:h100"] == [[[9, 0], [9, 0]]]
    here = run("kernels", "explain", "norm.rms_norm", "--plugins", "k")
    assert here.code == 0
    assert "runs on cuda, not on cpu" in here.out
    there = run(*ON_CUDA.split(), "--capability", "9.0")
    assert there.out.splitlines()[1].split()[:2] == ["k:h100", "chosen:"]
    older = run(*ON_CUDA.split(), "--capability", "8.0", "--json")
    gate = "capability 9.0 to 9.0, the device has 8.0"
    assert {"name": "k:h100", "gate": gate, "is": "kernel"} in json.loads(older.out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "explain norm",
            "write FAMILY.MODE, for example norm.rms_norm; `tokenspeed kernels list` shows every operation",
        ),
        ("explain norm.rms_norm --shape m", "write NAME=N"),
        ("explain norm.rms_norm --capability x", "write numbers with dots"),
        ("list nrm", "no active plugin has a kernel for nrm"),
    ],
)
def test_a_malformed_question_about_kernels_exits_with_2(run: Any, arguments: str, message: str) -> None:
    outcome = run("kernels", *arguments.split(), "--plugins", "none")
    assert outcome.code == 2
    assert message in outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("explain norm.rmsnorm", "did you mean 'norm.rms_norm'?; `tokenspeed kernels list` shows every operation"),
        ("explain nrm.rms_norm", "no family of kernels is named 'nrm'; did you mean 'norm'?; families are attention, "),
        ("bench gem.linear", "no family of kernels is named 'gem'; did you mean 'gemm'?"),
        ("explain moe.dispatch", "moe.dispatch: no active plugin has a kernel for it"),
        ("explain norm.rms_norm --dtype bf61", "--dtype: no element type 'bf61'; did you mean 'bf16'?"),
        ("explain norm.rms_norm --dtype bfloat61", "did you mean 'bfloat16'"),
        ("list nrm", "did you mean 'norm'?; families are attention, "),
        ("list norm.rmsnorm", "no active plugin has a kernel for norm.rmsnorm; did you mean 'norm.rms_norm'?"),
        ("explian norm.rms_norm", "invalid choice: 'explian'; did you mean 'explain'?"),
        ("explain norm.rms_norm --objective latncy", "invalid choice: 'latncy'; did you mean 'latency'?"),
    ],
)
def test_an_unknown_operation_family_or_element_type_names_the_nearest(run: Any, arguments: str, message: str) -> None:
    outcome = run("kernels", *arguments.split(), "--plugins", "none")
    assert outcome.code == 2
    assert message in outcome.err


def test_kernels_explain_takes_the_names_of_serve_for_element_types(run: Any) -> None:
    for name in ("bf16", "bfloat16", "half", "float"):
        assert run("kernels", "explain", "norm.rms_norm", "--plugins", "none", "--dtype", name).code == 0


def test_the_two_explains_say_which_is_which(run: Any) -> None:
    """One is asked about a model and answers with backends; the other about an operation and answers with a kernel."""
    assert "tokenspeed explain MODEL" in " ".join(run("kernels", "--help").out.split())
    assert "tokenspeed explain MODEL" in " ".join(run("kernels", "explain", "--help").out.split())
    assert "tokenspeed kernels explain FAMILY.MODE" in " ".join(run("explain", "--help").out.split())
    launched = run("kernels", "explain", "attention.decode", "--plugins", "none").out.splitlines()
    assert launched[-1].endswith("tokenspeed explain MODEL says which backend that is")
    assert "backend" not in run("kernels", "explain", "norm.rms_norm", "--plugins", "none").out
    slots = run("explain", "toy", "--plugins", "none", "--device", "cpu").out
    assert "tokenspeed kernels explain FAMILY.MODE" in slots


def test_env_hides_secrets_and_names_versions(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    facts = json.loads(run("env", "--json").out)
    assert facts["environment"]["HF_TOKEN"] == "(set)"
    assert facts["environment"]["OMP_NUM_THREADS"] == "1"
    assert facts["packages"]["pluggy"] != "not installed"
    assert "hf_secret" not in run("env").out


def test_env_tells_the_libraries_of_plugins(run: Any, folder: Any) -> None:
    folder.add("acme", "", distribution="dist-acme")
    with (folder.path / "dist_acme-1.0.dist-info" / "METADATA").open("a") as metadata:
        metadata.write("Requires-Dist: pytest>=1; python_version > '3'\nRequires-Dist: ghost-lib\n")
        metadata.write("Requires-Dist: tokenspeed-core\nRequires-Dist: other; extra == 'more'\n")
    packages = json.loads(run("env", "--json").out)["packages"]
    assert packages["pytest"] == pytest.__version__
    assert packages["ghost-lib"] == "not installed"
    assert {"tokenspeed-core", "other"}.isdisjoint(packages)


def test_kernels_bench_times_what_is_here_and_explain_shows_what_was_kept(run: Any, tmp_path: Path) -> None:
    kept = str(tmp_path / "times.json")
    asked = ("--dtype", "fp32", "--shape", "n=64", "--shape", "k=32", "--plugins", "")
    timed = run("kernels", "bench", "gemm.linear", *asked, "--device", "cpu", "--rows", "1,2", "--save", kept)
    assert timed.code == 0
    assert "builtin:torch" in timed.out
    assert "1 ROWS" in timed.out
    shown = run("kernels", "explain", "gemm.linear", *asked, "--kernel-times", kept)
    assert "chosen" in shown.out
    pages = ("--layout", "HND", "--feature", "kv_bf16", "--shape", "kv_heads=1", "--shape", "head_dim=8")
    assert run("kernels", "bench", "cache.write", *pages, "--device", "cpu", "--rows", "1", "--save", kept).code == 0
    (device,) = json.loads(Path(kept).read_text())["devices"].values()
    by_operation = {entry["operation"]: entry for entry in device}
    assert by_operation["cache.write"]["layout"] == "HND"
    assert by_operation["cache.write"]["kv"] == "bf16"
    each = by_operation["gemm.linear"]["each"]["builtin:torch"]
    assert len(each) == 2
    assert sum(each) == pytest.approx(by_operation["gemm.linear"]["us"]["builtin:torch"], abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "comm.all_reduce"), "it takes several processes to time"),
        (("bench", "gemm.linear", "--feature", "kv_fp8"), "--feature kv_fp8: bench times gemm.linear without it"),
        (("bench", "cache.write", "--feature", "sinks"), "--feature sinks: bench times cache.write without it"),
        (("bench", "gemm.linear", "--layout", "HND"), "--layout HND: gemm.linear has no KV pages"),
        (("bench", "gemm.linear", "--shape", "width=3"), "gemm.linear has the sizes n, k"),
        (("bench", "gemm.linear", "--rows", "1,x"), "--rows 1,x: write numbers with commas"),
        (("bench", "gemm"), "write FAMILY.MODE"),
        (("explain", "gemm.linear", "--dtype", "int7"), "no element type 'int7'"),
    ],
)
def test_kernels_bench_and_explain_refuse_by_name(run: Any, arguments: tuple[str, ...], message: str) -> None:
    refused = run("kernels", *arguments, *(("--device", "cpu") if arguments[0] == "bench" else ()))
    assert refused.code == 2
    assert message in refused.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kvstore-ratio", "1e30"), "--kvstore-ratio 1e+30: it must be at most 1000000 (accepted: 0 to 1000000)"),
        (
            ("--prefetch-threshold", "9" * 20),
            f"--prefetch-threshold {'9' * 20}: it must be at most 1073741824 (accepted: 1 to",
        ),
        (
            ("--kvstore-size", "-5G"),
            "--kvstore-size: '-5G' is below 1 byte; write bytes, or a whole number of K, M, G or T",
        ),
        (
            ("--kvstore-size", "9999999999T"),
            "it must be at most 4611686018427387904 (accepted: 1 to 4611686018427387904)",
        ),
        (
            ("--kv-events-config", '{"enable_kv_cache_events": true, "hwm": 99999999999999}'),
            "--kv-events-config: hwm is 99999999999999; it must be at most 2147483647 (accepted: 0 to 2147483647)",
        ),
        (("--session-retain-percent", "101"), "--session-retain-percent: 101 is above 100 (accepted: 0 to 100)"),
    ],
)
def test_a_number_out_of_range_exits_with_2_naming_flag_and_range(
    run: Any, flags: tuple[str, str], message: str
) -> None:
    outcome = run("explain", "toy", "--device", "cpu", *flags)
    assert outcome.code == 2
    assert message in outcome.err

"""What every slot chooses, from settings, model and plugins; and that nothing unasked ever takes a slot."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.config import EngineConfig, ParallelConfig
from tokenspeed.engine.accelerators import present_accelerators
from tokenspeed.engine.advice import parser_plugin
from tokenspeed.engine.assembly import assemble
from tokenspeed.errors import ConfigError, PluginError
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.types import KVLayout


def attention(name: str, supports: str = "", more: str = "") -> str:
    return (
        "@hookimpl\ndef tokenspeed_attention_backends():\n"
        f"    return [AttentionBackendSpec(name='{name}', target='mini_parts:Attention', priority=Priority.PERFORMANT, "
        f"supports=AttentionSupport({supports}), {more})]\n"
    )


def platform(name: str, device: str, found: str = "'a device'", more: str = "") -> str:
    return (
        "@hookimpl\ndef tokenspeed_platforms():\n"
        f"    return [PlatformSpec(name='{name}', target='mini_parts:Cpu', detect=__name__ + ':detect', device_type='{device}', {more})]\n"
        f"def detect(): return {found}\n"
    )


# -- settings


def test_what_was_left_open_comes_from_model_and_platform(core: Any) -> None:
    config = core.assemble().config
    assert (config.max_model_len, config.max_num_seqs, config.chunked_prefill_size) == (512, 64, 256)
    assert config.max_step_ms == 0
    assert core.assemble(max_step_ms=5.0).config.max_step_ms == 5
    assert (config.block_size, config.dtype, config.kv_cache_dtype, config.device) == (16, "float32", "float32", "cpu")
    assert config.disable_overlap_schedule is True
    assert core.assemble(disable_overlap_schedule=False).config.disable_overlap_schedule is False
    assert config.parallel.attn_tp_size == config.parallel.world_size == 1


def test_assembling_the_resolved_settings_again_gives_the_same_plan(core: Any) -> None:
    core.folder.add("fast", attention("fast"), first_party=True)
    first = core.assemble("", parallel=ParallelConfig(tensor_parallel_size=2, world_size=2))
    again = assemble(first.config, core.model(), host=core.load(), accelerators=list)
    assert again.plan == first.plan
    assert again.config == first.config


def test_a_callers_objective_counts_unless_the_flag_names_one(core: Any) -> None:
    """A request that wants no rounding of its own asks for it alone."""
    kernel = "KernelSpec(name='fast', family='norm', mode='rms_norm', target='m:k', objectives=('latency',), priority=Priority.SPECIALIZED)"
    core.folder.add("k", f"@hookimpl\ndef tokenspeed_kernels():\n    return [{kernel}]", first_party=True)

    def takes(objective: str, **config: Any) -> str:
        request = KernelRequest(family="norm", mode="rms_norm", dtype="fp32", shape={"hidden": 8}, objective=objective)
        return core.assemble("", **config).kernel_registry().choose(request).winner.name

    assert takes("latency") == "k:fast"
    assert takes("determinism") != "k:fast"
    assert takes("determinism", kernel_objective="latency") == "k:fast"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_model_len": 513}, "--max-model-len 513: the model was made for 512"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0"),
        ({"max_model_len": 1}, "--max-model-len 1: it must be at least 2"),
        ({"max_num_seqs": 100_000}, "--max-num-seqs 100000: it must be at most 65536"),
        ({"block_size": 100_000}, "--block-size 100000: it must be at most 65536"),
        ({"chunked_prefill_size": 2**31}, "--chunked-prefill-size 2147483648: it must be at most"),
        ({"max_total_tokens": 2**31}, "--max-total-tokens 2147483648: it must be at most"),
        ({"max_step_ms": -1.0}, "--max-step-ms -1.0: it must be at least 0"),
        ({"chunked_prefill_size": -1}, "--chunked-prefill-size -1"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization 1.5"),
        ({"max_total_tokens": 9, "kv_cache_memory_bytes": 9}, "give one of them"),
        ({"dtype": "int4"}, "--dtype int4: choose from"),
        ({"kv_cache_dtype": "fp4"}, "--kv-cache-dtype fp4: choose from auto, float32, bfloat16, float16, fp8"),
        ({"dtype": "fp8"}, "--dtype fp8: choose from auto, float32, bfloat16, float16"),
        ({"cudagraph_capture_sizes": (1, 2)}, "captures no graphs"),
        ({"parallel": ParallelConfig(tensor_parallel_size=3)}, "4 query heads over 2 KV heads cannot be dealt out"),
        ({"parallel": ParallelConfig(tensor_parallel_size=8)}, "sizes that work: 1, 2, 4"),
        (
            {"kvstore_write_policy": "selective"},
            "--kvstore-write-policy selective: it has no effect without a host tier",
        ),
        ({"prefetch_threshold": 5}, "--prefetch-threshold 5: it has no effect without a KV store, which --kvstore"),
        ({"prefetch_threshold": 5, "kvstore_ratio": 1.0}, "without a KV store"),
        ({"kvstore_timeout_ms": 9.0}, "--kvstore-timeout-ms 9: it has no effect without a KV store"),
        ({"parallel": ParallelConfig(tensor_parallel_size=2, attn_tp_size=1)}, "--attn-tp-size 1"),
        ({"parallel": ParallelConfig(tensor_parallel_size=2, dense_tp_size=4)}, "--dense-tp-size 4"),
        ({"parallel": ParallelConfig(tensor_parallel_size=2, moe_tp_size=1)}, "--moe-tp-size 1"),
        ({"parallel": ParallelConfig(tensor_parallel_size=2, world_size=4)}, "--world-size 4"),
        ({"parallel": ParallelConfig(tensor_parallel_size=0)}, "at least 1"),
        ({"plugin_options": {"ghost.n": "1"}}, "--set ghost.n"),
        ({"kernel_overrides": {"norm.rms_norm": "ghost"}}, "no such solution"),
        ({"attention_backend": "ghost"}, "--attention-backend ghost: no such attention backend"),
        ({"decode_attention_backend": "ghost"}, "--decode-attention-backend ghost"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_flag(core: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        core.assemble(**config)
    assert message in str(error.value)


OPTION = "@hookimpl\ndef tokenspeed_options():\n    return [OptionSpec(name='depth', type=int, default=3, help='how deep')]\n"


def test_an_option_of_a_store_that_is_not_chosen_is_refused(core: Any) -> None:
    spec = "[KVStoreSpec(name='shelf', target='mini_parts:Parser')]"
    core.folder.add("kvstore-shelf", f"@hookimpl\ndef tokenspeed_kv_stores():\n    return {spec}\n{OPTION}")
    for key in ("kvstore-shelf.depth", "shelf.depth"):
        for plugins in ("", "+kvstore-shelf"):
            with pytest.raises(
                ConfigError, match=rf"--set {key}: it has no effect without KV store shelf, which --kvstore"
            ):
                core.assemble(plugins, plugin_options={key: "4"})
        assembly = core.assemble(plugin_options={key: "4"}, kvstore="shelf")
        assert assembly.options_of("kv_store") == {"depth": 4}
        assert assembly.warnings == ()


def test_an_option_that_nothing_reads_is_a_warning(core: Any, caplog: Any) -> None:
    core.folder.add("fast", attention("fast") + OPTION)
    with caplog.at_level(logging.WARNING):
        assembly = core.assemble(plugin_options={"fast.depth": "4"}, arguments={"announce": True})
    assert assembly.warnings == (
        "--set fast.depth: plugin fast fills no slot and gives no kernel here; nothing reads its options",
    )
    assert [record.getMessage() for record in caplog.records] == list(assembly.warnings)
    for more in ({"attention_backend": "fast"}, {"plugins": "+fast"}):
        assert core.assemble(plugin_options={"fast.depth": "4"}, **more).warnings == ()


@pytest.mark.parametrize("tier", [{"kvstore_ratio": 0.5}, {"kvstore_size": 1 << 20}])
def test_a_write_policy_is_taken_with_a_host_tier(core: Any, tier: dict[str, Any]) -> None:
    assert core.assemble(kvstore_write_policy="selective", **tier).config.kvstore_write_policy == "selective"


@pytest.mark.parametrize(
    ("asked", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32")]
)
def test_element_types_are_taken_by_the_names_of_specs_too(core: Any, asked: str, dtype: str) -> None:
    config = core.assemble(dtype=asked, kv_cache_dtype=asked).config
    assert (config.dtype, config.kv_cache_dtype) == (dtype, dtype)


def test_heads_that_do_not_divide_evenly_are_dealt_out_in_whole_groups(core: Any) -> None:
    """SmolLM2's 9 query heads over 3 KV heads: the sizes that the refusal lists are the ones that start."""
    heads = {"config": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}}

    for size in range(1, 13):
        parallel = ParallelConfig(tensor_parallel_size=size, world_size=size)
        if size in (1, 2, 3, 9):
            assert core.assemble(model=heads, parallel=parallel).config.parallel.world_size == size
        else:
            with pytest.raises(ConfigError, match="sizes that work: 1, 2, 3, 9"):
                core.assemble(model=heads, parallel=parallel)


def test_a_model_without_a_length_needs_the_flag(core: Any) -> None:
    bare = {"config": {"max_position_embeddings": None}}
    with pytest.raises(ConfigError, match="--max-model-len"):
        core.assemble(model=bare)
    assert core.assemble(model=bare, max_model_len=100).config.max_model_len == 100


# -- model


def model_plugin(name: str, more: str) -> str:
    return f"@hookimpl\ndef tokenspeed_models():\n    return [ModelSpec(name='{name}', target='mini_parts:Model', {more})]\n"


def test_an_architecture_that_nobody_serves_says_how_to_get_it(core: Any) -> None:
    with pytest.raises(PluginError) as error:
        core.assemble(
            model={"name": "openai/gpt-oss-20b", "architecture": "GptOssForCausalLM", "model_type": "gpt_oss"}
        )
    assert "no installed plugin serves architecture GptOssForCausalLM (openai/gpt-oss-20b)" in str(error.value)
    assert "pip install tokenspeed-plugin-models-gpt-oss" in str(error.value)
    assert "builtin:mini: serves MiniForCausalLM" in str(error.value)


def test_a_broken_plugin_that_the_model_may_need_is_named_cause_first(core: Any) -> None:
    core.folder.add("models-llama", "raise ImportError('libx.so')")
    with pytest.raises(PluginError) as error:
        core.assemble(model={"architecture": "LlamaForCausalLM"})
    assert str(error.value).splitlines()[:2] == [
        "ImportError: libx.so",
        "plugin models-llama is broken and may have offered a model class",
    ]


def test_the_narrower_model_spec_wins(core: Any) -> None:
    narrow = model_plugin("narrow", "architectures=('MiniForCausalLM',), model_type='mini'")
    core.folder.add("narrow", narrow, first_party=True)
    assert core.assemble().model_spec.name == "narrow"
    assert core.assemble(model={"model_type": "other"}).model_spec.name == "mini"


def test_two_equal_model_specs_are_an_error_naming_both(core: Any) -> None:
    core.folder.add("twin", model_plugin("twin", "architectures=('MiniForCausalLM',)"), first_party=True)
    with pytest.raises(
        PluginError, match=r"builtin:mini and twin:twin claim the same place; put one first with --plugins \+twin"
    ):
        core.assemble()
    for plugins in ("+twin", "twin"):
        assert core.assemble(plugins).model_spec.name == "twin"
    assert core.assemble("-twin").model_spec.name == "mini"


@pytest.mark.parametrize("priority", ["PORTABLE", "PERFORMANT", "SPECIALIZED", "PLUGIN"])
def test_a_third_party_model_wins_its_architecture_where_plugins_names_it(core: Any, priority: str) -> None:
    more = f"architectures=('MiniForCausalLM',), priority=Priority.{priority}"
    core.folder.add("models-acme", model_plugin("granite", more))
    assert core.assemble().choices["model"].winner.name == "builtin:mini"
    for plugins in ("+models-acme", "models-acme"):
        choice = core.assemble(plugins).choices["model"]
        assert (choice.winner.name, choice.why) == ("models-acme:granite", "named in --plugins")
        assert choice.losers[0].reason == "--plugins names models-acme"


def test_a_third_party_model_that_is_named_comes_after_a_more_specific_one(core: Any) -> None:
    core.folder.add(
        "narrow", model_plugin("narrow", "architectures=('MiniForCausalLM',), model_type='mini'"), first_party=True
    )
    core.folder.add("models-acme", model_plugin("granite", "architectures=('MiniForCausalLM',)"))
    assert core.assemble("+models-acme").model_spec.name == "narrow"


def test_installing_a_parser_with_a_first_party_name_changes_no_command_line(core: Any) -> None:
    before = core.assemble(arguments={"tool_call_parser": "plain"})
    core.folder.add(
        "models-acme",
        "@hookimpl\ndef tokenspeed_tool_parsers():\n"
        "    return [ToolParserSpec(name='acme', target='mini_parts:Parser', aliases=('plain',))]\n"
        "@hookimpl\ndef tokenspeed_kernels():\n"
        "    return [KernelSpec(name='torch', family='norm', mode='rms_norm', target='mini_parts:rms', opt_in=True)]\n",
    )
    after = core.assemble(arguments={"tool_call_parser": "plain"})
    assert after.plan == before.plan
    full = core.assemble(arguments={"tool_call_parser": "models-acme:plain"})
    assert full.choices["tool_parser"].winner.name == "models-acme:acme"
    override = core.assemble(kernel_overrides={"norm.rms_norm": "torch"})
    assert [plugin.name for plugin in override.plan.plugins] == ["builtin"]


def test_a_gguf_file_is_served_only_where_its_architecture_is_declared(core: Any) -> None:
    """E16: its config is derived and names a class that a plugin may serve from other files alone."""
    core.folder.add("plain", model_plugin("plain", "architectures=('GgarchForCausalLM',)"), first_party=True)
    file = {"architecture": "GgarchForCausalLM", "gguf_architecture": "ggarch", "format": "gguf"}
    with pytest.raises(PluginError, match="no installed plugin serves GGUF architecture ggarch"):
        core.assemble(model=file)


def test_a_gguf_architecture_matches(core: Any) -> None:
    core.folder.add("gg", model_plugin("gg", "architectures=(), gguf_architectures=('ggarch',)"), first_party=True)
    assembly = core.assemble(model={"architecture": "Unknown", "gguf_architecture": "ggarch", "format": "gguf"})
    assert assembly.model_spec.name == "gg"


# -- platform


def test_installing_a_platform_plugin_without_its_device_changes_nothing(core: Any) -> None:
    core.folder.add(
        "hardware-x", platform("x", "x", found="None", more="priority=Priority.SPECIALIZED"), first_party=True
    )
    assembly = core.assemble()
    assert assembly.platform_spec.name == "cpu"
    assert "finds no such device here" in assembly.explain(verbose=True)


def test_a_device_that_is_found_is_preferred_and_device_cpu_is_not_replaced(core: Any) -> None:
    core.folder.add("hardware-x", platform("x", "x", more="priority=Priority.PERFORMANT"), first_party=True)
    assert core.assemble().platform_spec.name == "x"
    assert core.assemble(device="cpu").platform_spec.name == "cpu"
    with pytest.raises(ConfigError, match="--device tpu: no such platform"):
        core.assemble(device="tpu")


def test_a_platform_whose_detection_fails_is_fatal_unless_another_is_named(core: Any) -> None:
    core.folder.add("hardware-x", platform("x", "x", found="1 / 0"), first_party=True)
    with pytest.raises(PluginError) as error:
        core.assemble()
    assert str(error.value).startswith("ZeroDivisionError")
    assert core.assemble(device="cpu").platform_spec.name == "cpu"


def test_an_accelerator_that_nobody_serves_is_fatal_unless_device_is_cpu(core: Any, tmp_path: Path) -> None:
    core.folder.add("hardware-cuda", "raise ImportError('libcuda')")
    (tmp_path / "nvidia0").touch()
    arguments = {"accelerators": lambda: present_accelerators(tmp_path)}
    with pytest.raises(PluginError) as error:
        core.assemble(arguments=arguments)
    assert str(error.value).startswith("ImportError: libcuda")
    assert "an NVIDIA GPU is present" in str(error.value)
    assert "tokenspeed-plugin-hardware-cuda" in str(error.value)
    assert "--device cpu" in str(error.value)
    assert core.assemble(arguments=arguments, device="cpu").platform_spec.name == "cpu"


def test_accelerators_are_told_from_device_files(tmp_path: Path) -> None:
    assert present_accelerators(tmp_path) == []
    for name in ("nvidiactl", "nvidia1", "kfd", "davinci0"):
        (tmp_path / name).touch()
    assert [one.device_type for one in present_accelerators(tmp_path)] == ["cuda", "rocm", "npu"]


# -- attention and KV


def test_installing_an_attention_backend_changes_nothing_until_it_is_named(core: Any) -> None:
    core.folder.add("theirs", attention("theirs"))
    before = core.assemble()
    assert {spec.name for spec in before.attention.values()} == {"torch"}
    for named in (core.assemble("+theirs"), core.assemble("theirs"), core.assemble(attention_backend="theirs")):
        assert {spec.name for spec in named.attention.values()} == {"theirs"}


@pytest.mark.parametrize("asked", ["fp8", "fp8_e4m3"])
def test_a_backend_without_fp8_pages_loses_to_one_that_reads_them_and_says_why(core: Any, asked: str) -> None:
    core.folder.add("fast", attention("fast", "kv_dtypes=('fp32', 'bf16')"), first_party=True)
    assembly = core.assemble(kv_cache_dtype=asked)
    assert {spec.name for spec in assembly.attention.values()} == {"torch"}
    assert assembly.config.kv_cache_dtype == "fp8"
    assert "not fast:fast: takes a KV cache of fp32, bf16, not fp8" in assembly.explain(verbose=True)


@pytest.mark.parametrize(
    ("supports", "reason"),
    [
        ("kinds=('mla',)", "supports mla, not gqa"),
        ("dtypes=('bf16',)", "takes bf16, not fp32"),
        ("kv_dtypes=('fp8',)", "takes a KV cache of fp8, not fp32"),
        ("head_dims=(64, 128)", "takes head sizes 64, 128, not 16"),
        ("phases=('decode',)", "does not run extend"),
    ],
)
def test_a_backend_that_does_not_fit_loses_with_its_reason_and_fails_when_named(
    core: Any, supports: str, reason: str
) -> None:
    core.folder.add("fast", attention("fast", supports), first_party=True)
    assembly = core.assemble()
    assert assembly.attention["extend"].name == "torch"
    assert f"not fast:fast: {reason}" in assembly.explain(verbose=True)
    with pytest.raises(PluginError) as error:
        core.assemble(prefill_attention_backend="fast")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"sliding_window": 64}, "supports no sliding window"),
        ({"attn_logit_softcapping": 50.0}, "supports no soft cap"),
    ],
)
def test_what_the_models_layers_need_decides_the_backend(core: Any, config: dict[str, Any], reason: str) -> None:
    """E7: a window or a soft cap that a backend lacks is found at assembly, not in the first request's step."""
    core.folder.add("versed", attention("versed", "kinds=('gqa', 'window'), softcap=True"), first_party=True)
    core.folder.add("fast", attention("fast"), first_party=True)
    assembly = core.assemble(model={"config": config})
    assert assembly.attention["extend"].name == "versed"
    assert f", fast:fast: {reason}" in assembly.explain(verbose=True)
    switched_off = config | {"use_sliding_window": False, "attn_logit_softcapping": None}
    assert core.assemble(model={"config": switched_off}).attention["extend"].name == "fast"


def test_core_picks_the_layout_and_page_size_that_both_phases_list(core: Any) -> None:
    core.folder.add(
        "p", attention("p", "phases=('extend',), layouts=('HND', 'NHD'), page_sizes=(64, 32, 16)"), first_party=True
    )
    core.folder.add(
        "d", attention("d", "phases=('decode',), layouts=('NHD', 'HND'), page_sizes=(16, 32)"), first_party=True
    )
    assembly = core.assemble()
    assert {phase: spec.name for phase, spec in assembly.attention.items()} == {"extend": "p", "decode": "d"}
    assert (assembly.kv_layout, assembly.page_size) == (KVLayout.HND, 32)
    assert core.assemble(block_size=16).page_size == 16


def test_a_phase_that_was_set_decides_before_the_one_that_was_not(core: Any) -> None:
    core.folder.add("wide", attention("wide", "page_sizes=(64,)"), first_party=True)
    core.folder.add("narrow", attention("narrow", "page_sizes=(16,)", "opt_in=True"), first_party=True)
    assembly = core.assemble(decode_attention_backend="narrow")
    assert {phase: spec.name for phase, spec in assembly.attention.items()} == {"extend": "torch", "decode": "narrow"}
    assert assembly.page_size == 16
    assert "shares no page size with narrow:narrow" in assembly.explain(verbose=True)


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [("page_sizes=(64,)", "page_sizes=(16,)", "page size"), ("layouts=('NHD',)", "layouts=('HND',)", "KV layout")],
)
def test_two_named_backends_that_share_no_pages_are_refused_naming_both(
    core: Any, first: str, second: str, what: str
) -> None:
    core.folder.add("a", attention("a", first))
    core.folder.add("b", attention("b", second))
    with pytest.raises(PluginError) as error:
        core.assemble(prefill_attention_backend="a", decode_attention_backend="b")
    assert f"shares no {what} with" in str(error.value)
    assert "a:a" in str(error.value)
    assert "b:b" in str(error.value)


def test_a_page_size_that_the_backend_does_not_take_is_refused(core: Any) -> None:
    core.folder.add("fast", attention("fast", "page_sizes=(64,)"))
    with pytest.raises(PluginError, match="takes page sizes 64, not 48"):
        core.assemble(attention_backend="fast", block_size=48)


def test_the_models_stated_need_comes_after_the_flag_and_before_everything_else(core: Any) -> None:
    model = model_plugin("needy", "architectures=('NeedyForCausalLM',), attention_backend='special'")
    core.folder.add("needy", model + attention("special", more="opt_in=True"), first_party=True)
    needy = {"architecture": "NeedyForCausalLM"}
    assembly = core.assemble(model=needy)
    assert assembly.attention["decode"].name == "special"
    assert assembly.choices["attention.decode"].why == "model needy:needy needs it"
    assert core.assemble(model=needy, attention_backend="torch").attention["decode"].name == "torch"


def test_a_better_backend_that_lacks_a_package_is_a_warning_with_both_names(core: Any, caplog: Any) -> None:
    core.folder.add("fast", attention("fast", more="requires=('a-package-nobody-has',)"), first_party=True)
    with caplog.at_level(logging.WARNING):
        assembly = core.assemble(arguments={"announce": True})
    assert len(assembly.warnings) == 2
    assert "builtin:torch is used instead of fast:fast" in assembly.warnings[0]
    assert assembly.warnings[0] in [record.getMessage() for record in caplog.records]


# -- parsers, broken plugins, reports


def test_the_models_parser_is_taken_by_auto_and_none_switches_it_off(core: Any) -> None:
    assert core.assemble().tool_parser.name == "plain"
    assert core.assemble(arguments={"tool_call_parser": None}).tool_parser is None
    assert core.assemble().reasoning_parser is None


def test_plug_04_a_parser_of_a_plugin_is_known_in_every_mode_and_an_unknown_one_lists_the_known(core: Any) -> None:
    core.folder.add(
        "demo",
        "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='demo', target='mini_parts:Parser')]",
    )
    assert core.assemble(arguments={"tool_call_parser": "demo"}).tool_parser.name == "demo"
    with pytest.raises(ConfigError, match="did you mean 'demo'"):
        core.assemble(arguments={"tool_call_parser": "demmo"})
    with pytest.raises(ConfigError, match="--reasoning-parser demo: no such reasoning parser"):
        core.assemble(arguments={"reasoning_parser": "demo"})


def test_a_reasoning_parser_is_chosen_by_name(core: Any) -> None:
    core.folder.add(
        "r",
        "@hookimpl\ndef tokenspeed_reasoning_parsers():\n    return [ReasoningParserSpec(name='r', target='a:b', aliases=('think',))]",
    )
    assert core.assemble(arguments={"reasoning_parser": "think"}).reasoning_parser.name == "r"


def test_a_parser_that_the_model_would_like_and_is_not_there_is_a_warning(core: Any) -> None:
    core.folder.add("m", model_plugin("m", "architectures=('MForCausalLM',), tool_parser='exotic'"), first_party=True)
    assembly = core.assemble(model={"architecture": "MForCausalLM"})
    assert assembly.tool_parser is None
    assert (
        "stays text; no installed plugin has one of that name; --tool-call-parser NAME takes another"
        in (assembly.warnings[0])
    )


def test_a_parser_of_a_family_of_ours_that_is_not_there_is_told_to_be_installed(core: Any) -> None:
    core.folder.add("m", model_plugin("m", "architectures=('MForCausalLM',), tool_parser='qwen3_coder'"))
    model = {"architecture": "MForCausalLM"}
    assert "try pip install tokenspeed-plugin-parsers-qwen" in core.assemble(model=model).warnings[0]
    core.folder.add("parsers-qwen", "raise OSError('disk')", distribution="tokenspeed-plugin-parsers-qwen")
    assert "plugin parsers-qwen, which may have brought it, is broken" in core.assemble(model=model).warnings[0]


def test_a_parser_that_a_spec_misspells_names_the_nearest_and_no_package(core: Any) -> None:
    """The plugin's own parser is called acme; a package of the misspelt name was never made."""
    parser = "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='acme', target='mini_parts:Parser')]\n"
    core.folder.add("models-acme", parser + model_plugin("m", "architectures=('MForCausalLM',), tool_parser='acne'"))
    (warning,) = core.assemble(model={"architecture": "MForCausalLM"}).warnings
    assert warning == (
        "tool parser acne, which model models-acme:m uses, is not active, and what it would find stays text; "
        "no installed plugin has one of that name; did you mean 'acme'? --tool-call-parser NAME takes another"
    )


def test_a_renderer_is_the_one_that_the_model_names_or_the_flag(core: Any) -> None:
    core.folder.add(
        "r",
        "@hookimpl\ndef tokenspeed_renderers():\n    return [RendererSpec(name='own', target='a:b', aliases=('mine',))]",
        first_party=True,
    )
    core.folder.add("m", model_plugin("m", "architectures=('MForCausalLM',), renderer='own'"), first_party=True)
    assert core.assemble().renderer is None
    assert core.assemble(model={"architecture": "MForCausalLM"}).renderer.name == "own"
    assert core.assemble(arguments={"renderer": "mine"}).renderer.name == "own"
    assert core.assemble(model={"architecture": "MForCausalLM"}, arguments={"renderer": None}).renderer is None
    with pytest.raises(ConfigError, match="--renderer owm: no such renderer; installed and active: mine, own"):
        core.assemble(arguments={"renderer": "owm"})


def test_a_renderer_that_the_model_would_like_and_is_not_there_is_a_warning(core: Any) -> None:
    core.folder.add("m", model_plugin("m", "architectures=('MForCausalLM',), renderer='exotic'"), first_party=True)
    assembly = core.assemble(model={"architecture": "MForCausalLM"})
    assert (
        "chat needs a chat template; no installed plugin has one of that name; --renderer NAME" in assembly.warnings[0]
    )


def grammar_plugin(more: str = "") -> str:
    return (
        "@hookimpl\ndef tokenspeed_grammar_backends():\n"
        f"    return [GrammarBackendSpec(name='gram', target='a:b', checker='a:c', {more})]"
    )


def test_a_grammar_backend_is_taken_where_one_is_installed_and_none_switches_it_off(core: Any) -> None:
    assert core.assemble().grammar_backend is None
    assert "grammar_backend   none" in core.assemble().explain()
    with pytest.raises(ConfigError, match="--grammar-backend gram: no such grammar backend"):
        core.assemble(grammar_backend="gram")
    core.folder.add("g", grammar_plugin())
    assembly = core.assemble()
    assert assembly.grammar_backend.name == "gram"
    assert assembly.config.grammar_backend == "g:gram"
    assert assembly.plan.slots["grammar_backend"].target == "a:b"
    assert assemble(assembly.config, core.model(), host=core.load(), accelerators=list).plan == assembly.plan
    assert core.assemble(grammar_backend=None).grammar_backend is None
    assert core.assemble(grammar_backend="gram").choices["grammar_backend"].why == "--grammar-backend gram"


def test_a_grammar_backend_that_cannot_run_is_a_warning_unless_it_was_named(core: Any) -> None:
    core.folder.add("g", grammar_plugin("requires=('a-package-nobody-has',)"), first_party=True)
    assembly = core.assemble()
    assert assembly.grammar_backend is None
    assert "requests with a grammar are refused: g:gram" in assembly.warnings[0]
    with pytest.raises(PluginError, match="a-package-nobody-has"):
        core.assemble(grammar_backend="gram")


def test_an_installed_plugin_that_was_left_out_is_not_told_to_be_installed(core: Any) -> None:
    core.folder.add("models-far", "", distribution="tokenspeed-plugin-models-far")
    core.folder.add("parsers-exotic", "", distribution="tokenspeed-plugin-parsers-exotic")
    core.folder.add("m", model_plugin("m", "architectures=('MForCausalLM',), tool_parser='exotic'"), first_party=True)
    with pytest.raises(PluginError) as error:
        core.assemble("m", model={"architecture": "FarForCausalLM", "model_type": "far"})
    assert "try adding models-far to --plugins, which leaves it out" in str(error.value)
    assembly = core.assemble("m", model={"architecture": "MForCausalLM"})
    assert "try adding parsers-exotic to --plugins, which leaves it out" in assembly.warnings[0]


def test_a_parser_of_a_known_family_is_advised_by_the_plugin_that_brings_it() -> None:
    assert parser_plugin("qwen3_coder") == "tokenspeed-plugin-parsers-qwen"
    assert parser_plugin("gpt_oss") == "tokenspeed-plugin-parsers-gpt-oss"
    assert parser_plugin("exotic") == ""


def test_plug_03_a_broken_plugin_that_nobody_needs_is_one_line_and_the_start_goes_on(core: Any, caplog: Any) -> None:
    core.folder.add("sick", "raise ImportError('libfoo.so')")
    with caplog.at_level(logging.WARNING):
        assembly = core.assemble(arguments={"announce": True})
    assert [record.getMessage() for record in caplog.records] == [
        "plugin 'sick' is broken and not used: ImportError: libfoo.so"
    ]
    assert "sick: ImportError: libfoo.so" in assembly.explain()
    (listed,) = [plugin for plugin in assembly.to_json()["plugins"] if plugin["name"] == "sick"]
    assert (listed["status"], listed["cause"], listed["in_plan"]) == ("broken", "ImportError: libfoo.so", False)


def test_the_start_up_block_names_every_slot_with_its_reason(core: Any) -> None:
    text = core.assemble(kernel_overrides={"norm.rms_norm": "torch"}).explain()
    for phrase in (
        "platform          builtin:cpu",
        "model             builtin:mini",
        "attention.decode  builtin:torch",
        "tool_parser       builtin:plain",
        "the only one that fits",
        "layout NHD, page 16",
        "norm.rms_norm = torch",
    ):
        assert phrase in text


def test_registering_after_assembly_raises(core: Any) -> None:
    assembly = core.assemble()
    assert assembly.registry.frozen
    with pytest.raises(PluginError, match="after the plan was frozen"):
        assembly.registry.add(assembly.registry.specs("tool_parser"))


def test_the_kernel_registry_follows_the_settings(core: Any) -> None:
    from tokenspeed.interfaces.kernel import KernelRequest

    kernels = core.assemble(kernel_overrides={"norm.rms_norm": "torch"}).kernel_registry()
    request = KernelRequest(family="norm", mode="rms_norm", dtype="fp32")
    assert kernels.select(request)(3) == 3
    assert kernels.choose(request).why == "--kernel norm.rms_norm torch"


def test_a_model_path_is_recorded(core: Any) -> None:
    assembly = assemble(EngineConfig(model="m"), core.model(path="/models/m"), host=core.load(), accelerators=list)
    assert assembly.config.model_path == "/models/m"

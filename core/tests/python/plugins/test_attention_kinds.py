"""Each kind of a model's attention layers gets the best backends for it, over pages that all of them read."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.settings import attention_shapes
from tokenspeed.errors import ConfigError, PluginError

BOTH = {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "head_dim": 64}
LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def backend(name: str, supports: str, more: str = "") -> str:
    return (
        "@hookimpl\ndef tokenspeed_attention_backends():\n"
        f"    return [AttentionBackendSpec(name='{name}', target='mini_parts:Attention', priority=Priority.PERFORMANT, "
        f"supports=AttentionSupport({supports}), {more})]\n"
    )


@pytest.fixture
def two(core: Any) -> Any:
    """``fast`` knows no windows, ``versed`` does and ranks behind it."""
    core.folder.add("fast", backend("fast", "page_sizes=(64, 16)"), first_party=True)
    core.folder.add("versed", backend("versed", "kinds=('gqa', 'window'), page_sizes=(32, 16)"), first_party=True)
    return core


def test_layers_with_a_window_do_not_cost_the_others_their_backend(two: Any) -> None:
    assembly = two.assemble(model={"config": BOTH})
    chosen = {slot: choice.winner.name for slot, choice in assembly.choices.items() if slot.startswith("attention.")}
    assert chosen == {
        "attention.extend": "fast:fast",
        "attention.decode": "fast:fast",
        "attention.window.extend": "versed:versed",
        "attention.window.decode": "versed:versed",
    }
    assert assembly.page_size == 16, "the one size that all of them take"
    assert assembly.attention_kinds == ("full", "window")
    assert assembly.attention_slots("window")["decode"] == "attention.window.decode"
    assert assembly.attention_slots("mla")["decode"] == "attention.decode"


def test_the_start_block_and_the_plan_name_every_kind(two: Any) -> None:
    assembly = two.assemble(model={"config": BOTH})
    lines = assembly.explain(verbose=True).splitlines()
    assert any("attention.decode" in line and "fast:fast" in line and "full-attention layers" in line for line in lines)
    at = next(number for number, line in enumerate(lines) if "attention.window.decode" in line)
    assert "versed:versed" in lines[at]
    assert "sliding-window layers" in lines[at]
    assert any("fast:fast: supports no sliding window" in line for line in lines[at : at + 4])
    told = assembly.to_json()
    assert told["choices"]["attention.window.extend"]["winner"] == "versed:versed"
    assert told["plan"]["slots"]["attention.window.extend"]["name"] == "versed"


def test_the_resolved_settings_lead_to_the_same_plan_where_kinds_differ(two: Any) -> None:
    description = two.model(config=BOTH)
    first = two.assemble(model={"config": BOTH})
    again = assemble(first.config, description, host=two.load(), accelerators=list)
    assert again.plan == first.plan
    assert again.config == first.config


def test_a_flag_speaks_for_every_kind_and_says_which_it_cannot_serve(two: Any) -> None:
    for flag, field in (
        ("--attention-backend", "attention_backend"),
        ("--decode-attention-backend", "decode_attention_backend"),
    ):
        with pytest.raises(PluginError) as error:
            two.assemble(model={"config": BOTH}, **{field: "fast"})
        assert "sliding-window layers" in str(error.value)
        assert f"fast:fast ({flag} fast) cannot be used: supports no sliding window" in str(error.value)
    served = two.assemble(model={"config": BOTH}, attention_backend="versed")
    assert {choice.winner.name for slot, choice in served.choices.items() if slot.startswith("attention.")} == {
        "versed:versed"
    }


def test_where_the_best_leaves_nothing_for_other_layers_these_are_served_first(core: Any) -> None:
    core.folder.add("fast", backend("fast", "page_sizes=(64,)"), first_party=True)
    core.folder.add("versed", backend("versed", "kinds=('gqa', 'window'), page_sizes=(32,)"), first_party=True)
    assembly = core.assemble(model={"config": BOTH})
    assert assembly.page_size == 32
    assert assembly.choices["attention.window.decode"].spec.name == "versed"
    assert assembly.attention["decode"].name != "fast"
    assert "fast:fast: shares no page size with versed:versed" in assembly.explain(verbose=True)


def test_layers_that_nothing_serves_are_named_with_every_reason(core: Any) -> None:
    core.folder.add("fast", backend("fast", "page_sizes=(64,)"), first_party=True)
    with pytest.raises(PluginError) as error:
        core.assemble(model={"config": BOTH})
    assert str(error.value).startswith("no attention backend (extend, sliding-window layers) fits")
    assert "fast:fast: supports no sliding window" in str(error.value)


def test_a_models_spec_may_tell_kinds_that_its_configuration_does_not(core: Any) -> None:
    spec = "architectures=('TwoForCausalLM',), attention_kinds=('mla', 'full')"
    core.folder.add(
        "two",
        f"@hookimpl\ndef tokenspeed_models():\n    return [ModelSpec(name='two', target='mini_parts:Model', {spec})]\n",
        first_party=True,
    )
    core.folder.add("latent", backend("latent", "kinds=('mla',), head_dims=(576,)"), first_party=True)
    assembly = core.assemble(model={"architecture": "TwoForCausalLM", "config": LATENTS})
    assert assembly.attention["decode"].name == "torch"
    assert assembly.choices["attention.mla.decode"].spec.name == "latent"
    assert "layers of latents" in assembly.explain()


@pytest.mark.parametrize(
    ("config", "kinds", "expected"),
    [
        ({}, (), {"full": ("gqa", 64, False)}),
        ({"sliding_window": 9}, (), {"window": ("gqa", 64, True)}),
        (BOTH, (), {"full": ("gqa", 64, False), "window": ("gqa", 64, True)}),
        (BOTH | {"use_sliding_window": False}, (), {"full": ("gqa", 64, False)}),
        ({"sliding_window": 9, "layer_types": ["sliding_attention"] * 2}, (), {"window": ("gqa", 64, True)}),
        (LATENTS, (), {"mla": ("mla", 576, False)}),
        (LATENTS, ("mla", "full"), {"full": ("gqa", 64, False), "mla": ("mla", 576, False)}),
        ({}, ("window",), {"window": ("gqa", 64, True)}),
    ],
)
def test_kinds_of_layers_as_the_configuration_or_the_spec_tells_them(
    config: dict[str, Any], kinds: tuple[str, ...], expected: dict[str, Any]
) -> None:
    shapes = attention_shapes(HEADS | config, kinds)
    assert {kind: (shape.kind, shape.head_dim, shape.window) for kind, shape in shapes.items()} == expected
    assert list(shapes) == list(expected), "the main kind first"


def test_a_kind_that_does_not_exist_or_has_no_sizes_is_refused() -> None:
    with pytest.raises(PluginError, match="lists attention_kinds cross; there are full, window, mla"):
        attention_shapes(HEADS, ("cross",))
    with pytest.raises(ConfigError, match="has no 'kv_lora_rank'"):
        attention_shapes(HEADS, ("full", "mla"))

"""Options of plugins: declared as data, found by name, typed and checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tokenspeed.errors import ConfigError
from tokenspeed.plugins.options import check_option, hide_given, hide_values, parse_option, resolve_options
from tokenspeed.plugins.registry import Contribution
from tokenspeed.plugins.specs import OptionSpec


def option(plugin: str = "attention-flashinfer", **spec: Any) -> Contribution[OptionSpec]:
    return Contribution(plugin, OptionSpec(**{"name": "workspace_mb", "type": int, "default": 256, "help": ""} | spec))


def test_defaults_and_given_values() -> None:
    declared = [
        option(),
        option(name="fast", type=bool, default=False),
        option("kernels-cpu", name="isa", type=str, default=""),
    ]
    values = resolve_options(declared, {"flashinfer.workspace_mb": "512", "kernels-cpu.isa": "avx2"})
    assert values == {"attention-flashinfer": {"workspace_mb": 512, "fast": False}, "kernels-cpu": {"isa": "avx2"}}


@pytest.mark.parametrize(
    ("spec", "text", "value"),
    [
        ({}, "-3", -3),
        ({"type": float, "default": 1.0}, "2", 2.0),
        ({"type": bool, "default": False}, "ON", True),
        ({"type": bool, "default": True}, "0", False),
        ({"type": str, "default": ""}, "1.0", "1.0"),
        ({"choices": (256, 512)}, "512", 512),
    ],
)
def test_values_are_typed(spec: dict[str, Any], text: str, value: Any) -> None:
    parsed = parse_option(option(**spec).spec, text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("spec", "text", "fault"),
    [
        ({}, "12.5", "not of type int"),
        ({"type": bool, "default": False}, "maybe", "write true or false"),
        ({"type": str, "default": "a", "choices": ("a", "b")}, "c", "choose from a, b"),
        ({"minimum": 0}, "-1", "the least is 0"),
        ({"maximum": 1024}, "1025", "the most is 1024"),
        ({"type": float, "default": 0.0}, "x", "not of type float"),
    ],
)
def test_a_bad_value_is_refused_naming_the_option(spec: dict[str, Any], text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_options([option(**spec)], {"attention-flashinfer.workspace_mb": text})
    assert str(error.value).startswith("--set attention-flashinfer.workspace_mb: the value is")
    assert fault in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("attention-flashinfr.workspace_mb", "did you mean 'attention-flashinfer'"),
        ("flashinfer.workspace", "did you mean 'workspace_mb'"),
        ("workspace_mb", "write PLUGIN.OPTION=VALUE"),
        ("idle.workspace_mb", "installed but not active"),
    ],
)
def test_an_unknown_plugin_or_option_names_the_nearest(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_options([option()], {given: "1"}, inactive=["idle"])


def test_a_short_name_that_fits_two_plugins_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention-triton or kernels-triton"):
        resolve_options([option("attention-triton"), option("kernels-triton")], {"triton.workspace_mb": "1"})


def test_a_short_name_of_a_first_party_plugin_stays_its_own_whatever_is_installed_beside_it() -> None:
    theirs = dataclasses.replace(option("acme-triton"), first_party=False)
    declared = [option("attention-triton"), theirs]
    given = {"triton.workspace_mb": "1", "acme-triton.workspace_mb": "2"}
    values = resolve_options(declared, given)
    assert values == {"attention-triton": {"workspace_mb": 1}, "acme-triton": {"workspace_mb": 2}}


@pytest.mark.parametrize(
    "spec",
    [
        {"type": list, "default": []},
        {"default": "256"},
        {"default": True},
        {"default": 1, "choices": (2, 3)},
        {"default": -1, "minimum": 0},
        {"name": "a.b"},
    ],
)
def test_a_bad_declaration_is_found(spec: dict[str, Any]) -> None:
    assert check_option(option(**spec).spec)


def test_a_good_declaration_passes() -> None:
    assert check_option(option(minimum=0, maximum=1024).spec) == ""
    assert check_option(option(type=float, default=1).spec) == ""


def test_secrets_are_hidden_wherever_values_are_shown() -> None:
    """By the plugin's full name and its short one; what is not secret, and a secret's default, stay readable."""
    declared = [
        Contribution(plugin="kvstore-x", spec=OptionSpec(name=name, type=str, default="none", help="", secret=secret))
        for name, secret in (("url", True), ("prefix", False))
    ]
    given = {"kvstore-x.url": "x://:pw@host", "x.url": "x://:pw@host", "kvstore-x.prefix": "p", "other.url": "shown"}
    hidden = hide_given(declared, given)
    assert hidden == {"kvstore-x.url": "***", "x.url": "***", "kvstore-x.prefix": "p", "other.url": "shown"}
    values = {"kvstore-x": {"url": "x://:pw@host", "prefix": "p"}, "other": {"url": "shown"}}
    assert hide_values(declared, values) == {"kvstore-x": {"url": "***", "prefix": "p"}, "other": {"url": "shown"}}
    assert hide_values(declared, {"kvstore-x": {"url": "none"}}) == {"kvstore-x": {"url": "none"}}


@pytest.mark.parametrize("text", ["99999999999999999999", "-99999999999999999999"])
def test_a_whole_number_that_no_64_bits_hold_is_refused_by_name(text: str) -> None:
    """Whatever bounds the plugin declares: what reads the option may be compiled code."""
    with pytest.raises(ConfigError, match=f"--set flashinfer.workspace_mb: the value is {text}, which no 64 bits hold"):
        resolve_options([option()], {"flashinfer.workspace_mb": text})

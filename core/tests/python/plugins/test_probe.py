"""What a spec's ``probe`` finds missing is told where the choice is made; what was chosen by itself gives way, what was named is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.errors import ConfigError, UnusableChoiceError


def backends(probe: str) -> str:
    return f"""
@hookimpl
def tokenspeed_attention_backends():
    return [
        AttentionBackendSpec(name="fast", target="mini_parts:Attention", priority=Priority.PERFORMANT, probe=__name__ + ":probe", {{}}),
        AttentionBackendSpec(name="slow", target="mini_parts:Attention"),
    ]
def probe():
    {probe}
"""


def test_a_backend_that_lacks_something_gives_way_with_a_warning(core: Any) -> None:
    core.folder.add("att", backends("return 'needs nvcc'").format(""), first_party=True)
    assembly = core.assemble()
    assert [spec.name for spec in assembly.attention.values()] == ["slow", "slow"]
    assert (
        "attention backend (decode): att:slow is used instead of att:fast, which cannot run: needs nvcc"
        in assembly.warnings
    )


@pytest.mark.parametrize("flag", ["attention_backend", "prefill_attention_backend"])
def test_a_backend_that_was_named_is_refused_with_what_it_lacks(core: Any, flag: str) -> None:
    core.folder.add("att", backends("return 'needs nvcc'").format(""), first_party=True)
    with pytest.raises(UnusableChoiceError, match=r"att:fast .* cannot be used: needs nvcc"):
        core.assemble(**{flag: "fast"})
    assert issubclass(UnusableChoiceError, ConfigError), "exit code 2"


@pytest.mark.parametrize(("probe", "name"), [("return ''", "fast"), ("raise OSError('no disk')", "slow")])
def test_a_probe_that_finds_all_changes_nothing_and_one_that_fails_counts_as_lacking(
    core: Any, probe: str, name: str
) -> None:
    core.folder.add("att", backends(probe).format(""), first_party=True)
    assembly = core.assemble()
    assert {spec.name for spec in assembly.attention.values()} == {name}
    assert any("OSError: no disk" in warning for warning in assembly.warnings) is (name == "slow")


def test_nothing_is_asked_of_what_runs_elsewhere(core: Any) -> None:
    core.folder.add("att", backends("raise AssertionError('asked')").format('platforms=("tpu",)'), first_party=True)
    assembly = core.assemble()
    assert {spec.name for spec in assembly.attention.values()} == {"slow"}
    assert not assembly.warnings


def test_a_device_that_was_asked_for_and_is_not_there_is_told_why(core: Any) -> None:
    core.folder.add(
        "hw",
        """
@hookimpl
def tokenspeed_platforms():
    return [PlatformSpec(name="x", target="mini_parts:Cpu", detect=__name__ + ":detect", probe=__name__ + ":absence", device_type="x")]
def detect(): return None
def absence(): return "the driver of x is not installed"
""",
        first_party=True,
    )
    with pytest.raises(UnusableChoiceError, match="finds no such device here; the driver of x is not installed"):
        core.assemble(device="x")
    assembly = core.assemble()
    assert assembly.platform_spec.name == "cpu"
    assert not assembly.warnings, "a host without the device is no fault"
    assert "the driver of x is not installed" in assembly.explain(verbose=True)


def test_a_platforms_order_decides_every_slot_that_is_filled_without_a_flag(core: Any) -> None:
    core.folder.add(
        "own",
        """
@hookimpl
def tokenspeed_platforms():
    return [PlatformSpec(name="x", target=__name__ + ":X", detect=__name__ + ":detect", device_type="x")]
@hookimpl
def tokenspeed_models():
    return [ModelSpec(name=name, target="mini_parts:Model", architectures=("MiniForCausalLM",), platforms=("x",)) for name in ("a", "b")]
@hookimpl
def tokenspeed_attention_backends():
    return [AttentionBackendSpec(name=name, target="mini_parts:Attention", platforms=("x",)) for name in ("a", "b", "c")]
@hookimpl
def tokenspeed_grammar_backends():
    return [GrammarBackendSpec(name=name, target="m:G", checker="m:check", platforms=("x",)) for name in ("a", "b")]
def detect(): return "an x"
from mini_parts import Cpu
class X(Cpu):
    name = "x"
    def preferences(self, kind):
        return {"attention_backend": ("b",), "attention_backend.decode": ("c",), "model": ("b",), "grammar_backend": ("b",)}.get(kind, ())
""",
        first_party=True,
    )
    assembly = core.assemble(device="x")
    taken = {slot: choice.spec.name for slot, choice in assembly.choices.items() if slot != "platform"}
    assert taken == {"model": "b", "attention.extend": "b", "attention.decode": "c", "grammar_backend": "b"}
    assert assembly.choices["model"].why == "first in the platform's order"

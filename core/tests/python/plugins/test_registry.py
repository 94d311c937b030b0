"""The registry holds what plugins brought until it is frozen."""

from __future__ import annotations

import pytest

from tokenspeed.errors import PluginError
from tokenspeed.interfaces import kernel
from tokenspeed.plugins import hookspecs, specs
from tokenspeed.plugins.registry import REGISTRATION_HOOKS, Contribution, Registry, check_spec
from tokenspeed.plugins.specs import (
    AttentionBackendSpec,
    AttentionSupport,
    KernelSpec,
    KVStoreSpec,
    Priority,
    ToolParserSpec,
)


def parser(name: str) -> Contribution[ToolParserSpec]:
    return Contribution("p", ToolParserSpec(name=name, target="a:b"))


def kernel_of(mode: str) -> Contribution[KernelSpec]:
    return Contribution("p", KernelSpec(name="k", target="a:b", family="norm", mode=mode))


def test_registering_after_the_freeze_raises_naming_the_plugin() -> None:
    registry = Registry()
    registry.add([parser("a")])
    registry.freeze()
    with pytest.raises(PluginError, match="plugin 'p' registers tool_parser 'b' after the plan was frozen"):
        registry.add([parser("b")])
    assert [c.name for c in registry.specs("tool_parser")] == ["p:a"]


def test_one_plugin_cannot_bring_a_name_twice_but_kernels_are_named_within_their_mode() -> None:
    registry = Registry()
    registry.add([kernel_of("rms_norm"), kernel_of("add_rms_norm")])
    with pytest.raises(PluginError, match=r"norm\.rms_norm=k' twice"):
        registry.add([kernel_of("rms_norm")])


def test_an_unknown_kind_is_an_error_that_lists_the_kinds() -> None:
    with pytest.raises(PluginError, match="tool_parser"):
        Registry().specs("parser")  # type: ignore[call-overload]


def test_a_store_needs_no_checker_but_one_that_is_named_must_be_a_target() -> None:
    assert check_spec(KVStoreSpec(name="s", target="a:b")) == ""
    assert "checker of 's' is 'check'" in check_spec(KVStoreSpec(name="s", target="a:b", checker="check"))


def test_a_misspelt_word_of_a_spec_is_named_with_the_nearest() -> None:
    backend = AttentionBackendSpec(name="a", target="a:b", supports=AttentionSupport(phases=("decod",)))
    assert check_spec(backend) == (
        "phases of attention backend 'a' holds 'decod'; did you mean 'decode'?; it may hold extend, decode"
    )
    kernel = KernelSpec(name="k", target="a:b", family="norm", mode="rms_norm", dtypes=("bfloat16",))
    assert check_spec(kernel).startswith("dtypes of kernel 'k' holds 'bfloat16'")


def test_contributions_come_sorted() -> None:
    registry = Registry()
    registry.add([parser("b"), parser("a")])
    assert [c.spec.name for c in registry.specs("tool_parser")] == ["a", "b"]


def test_being_named_ranks_as_plugin() -> None:
    spec = ToolParserSpec(name="a", target="a:b", priority=Priority.REFERENCE)
    assert Contribution("p", spec).priority is Priority.REFERENCE
    assert Contribution("p", spec, named=True).priority is Priority.PLUGIN


def test_every_hook_is_either_a_registration_hook_with_its_spec_or_takes_a_context() -> None:
    hooks = {name for name in vars(hookspecs) if name.startswith("tokenspeed_")}
    assert set(REGISTRATION_HOOKS) <= hooks
    for name in hooks - set(REGISTRATION_HOOKS):
        assert "context" in getattr(hookspecs, name).__annotations__
    kinds = [cls.KIND for cls in REGISTRATION_HOOKS.values()]
    assert len(set(kinds)) == len(kinds)


def test_kernel_families_are_defined_once() -> None:
    assert kernel.FAMILIES is specs.KERNEL_FAMILIES
    assert kernel.OBJECTIVES is specs.KERNEL_OBJECTIVES

"""Which kernel an operation gets: gates, override, objective, priority; remembered; explained."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tokenspeed.errors import ConfigError, PluginError
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.plugins.registry import Contribution
from tokenspeed.plugins.specs import KernelSpec, Priority


def kernel(
    name: str, plugin: str = "ours", *, automatic: bool = True, named: bool = False, **spec: Any
) -> Contribution[KernelSpec]:
    fields = {"target": f"parts:{name}", "family": "norm", "mode": "rms_norm"} | spec
    return Contribution(plugin, KernelSpec(name=name, **fields), automatic=automatic, named=named)


REFERENCE = kernel("torch", "builtin", priority=Priority.REFERENCE)


def registry(*kernels: Contribution[KernelSpec], **arguments: Any) -> KernelRegistry:
    arguments.setdefault("platform_name", "cpu")
    return KernelRegistry([REFERENCE, *kernels], **arguments)


def request(**fields: Any) -> KernelRequest:
    return KernelRequest(**{"family": "norm", "mode": "rms_norm", "dtype": "fp32"} | fields)


@pytest.fixture
def parts(folder: Any) -> Any:
    folder.write_module(
        "parts",
        """
made = []
def torch(x): return "torch"
def fast(x): return "fast"
def pooled(ctx):
    made.append(ctx)
    return lambda x: "pooled"
def sick_factory(ctx): raise OSError("no huge pages")
def misled(ctx):
    from tokenspeed.errors import ConfigError
    raise ConfigError("the file is of another card")
""",
    )
    return folder


@pytest.mark.parametrize(
    ("spec", "asked", "gate"),
    [
        ({"platforms": ("cuda",)}, {}, "runs on cuda, not on cpu"),
        ({"capability": ((9, 0), (9, 0))}, {}, "capability 9.0 to 9.0, the device has 8.0"),
        ({"capability": ((9,), (10, 0))}, {}, "capability 9 to 10.0, the device has 8.0"),
        ({"dtypes": ("bf16", "fp16")}, {}, "takes bf16, fp16, not fp32"),
        ({"layouts": ("HND",)}, {"layout": "NHD"}, "takes layout HND, not NHD"),
        ({"features": frozenset({"window"})}, {"features": frozenset({"sinks", "window"})}, "lacks sinks"),
        ({"traits": (("m", 1, 32),)}, {"shape": {"m": 33}}, "takes m 1 to 32, not 33"),
        ({"traits": (("m", 1, 32),)}, {}, "takes m 1 to 32, and the caller does not fix m"),
        ({"objectives": ("throughput",)}, {}, "meant for throughput, not latency"),
        ({"requires": ("a-package-nobody-has",)}, {}, "requires a-package-nobody-has (not installed)"),
        ({"needs": ("helper",)}, {}, "needs plugin helper, which is not active"),
        ({"opt_in": True}, {}, "taken only when named by a flag or in --plugins"),
    ],
)
def test_a_gate_refuses_and_explain_names_it(spec: dict[str, Any], asked: dict[str, Any], gate: str) -> None:
    reference = kernel("torch", "builtin", priority=Priority.REFERENCE, features=frozenset({"sinks", "window"}))
    kernels = KernelRegistry(
        [reference, kernel("fast", priority=Priority.SPECIALIZED, **spec)],
        platform_name="cpu",
        capability=(8, 0),
        active=["builtin", "ours"],
    )
    assert kernels.explain(request(**asked)) == [("builtin:torch", ""), ("ours:fast", gate)]


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ({"platforms": ("cpu", "cuda")}, {}),
        ({"capability": ((8, 0), (9, 0))}, {}),
        ({"dtypes": ("fp32",)}, {}),
        ({"layouts": ("HND",)}, {}),
        ({"features": frozenset({"sinks"})}, {}),
        ({"traits": (("m", 1, 32),)}, {"shape": {"m": 32}}),
        ({"objectives": ("latency",)}, {}),
    ],
)
def test_a_gate_lets_through_what_fits(spec: dict[str, Any], asked: dict[str, Any]) -> None:
    kernels = registry(kernel("fast", priority=Priority.SPECIALIZED, **spec), capability=(8, 0))
    assert kernels.choose(request(**asked)).winner.name == "ours:fast"


def test_a_capability_bound_needs_a_capability() -> None:
    assert (
        registry(kernel("fast", capability=((0,), (99,)))).explain(request())[1][1]
        == "capability 0 to 99, the device has none"
    )


def test_an_override_wins_over_priority_and_objective_but_must_pass_the_gates() -> None:
    fast = kernel("fast", priority=Priority.SPECIALIZED)
    debug = kernel("checked", objectives=("debug",))
    cuda = kernel("gpu", platforms=("cuda",))
    for solution in ("checked", "ours:checked"):
        kernels = registry(fast, debug, cuda, overrides={"norm.rms_norm": solution})
        assert kernels.choose(request()).winner.name == "ours:checked"
    with pytest.raises(PluginError, match=r"ours:gpu .* cannot be used: runs on cuda, not on cpu"):
        registry(fast, debug, cuda, overrides={"norm.rms_norm": "gpu"}).select(request())


def test_an_override_of_nothing_is_refused_at_once_naming_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'norm\.rms_norm'"):
        registry(overrides={"norm.rmsnorm": "torch"})
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        registry(overrides={"norm.rms_norm": "trch"})


def test_plug_06_two_owners_of_a_solution_are_both_named() -> None:
    both = [kernel("cpu", "p1"), kernel("cpu", "p2", named=True)]
    for overrides in ({}, {"norm.rms_norm": "cpu"}):
        with pytest.raises(PluginError) as error:
            registry(*both, overrides=overrides).select(request())
        assert "p1:cpu" in str(error.value)
        assert "p2:cpu" in str(error.value)


def test_an_unasked_plugin_is_used_only_where_nothing_else_fits() -> None:
    theirs = kernel("theirs", "theirs", automatic=False, priority=Priority.SPECIALIZED)
    assert registry(theirs).choose(request()).winner.name == "builtin:torch"
    alone = KernelRegistry([theirs], platform_name="cpu")
    assert alone.choose(request()).winner.name == "theirs:theirs"


def test_the_objective_of_the_registry_replaces_that_of_requests() -> None:
    kernels = registry(kernel("fast", priority=Priority.SPECIALIZED, objectives=("latency",)), objective="determinism")
    assert kernels.choose(request(objective="latency")).winner.name == "builtin:torch"
    with pytest.raises(PluginError, match="no objective is named 'speed'"):
        registry().choose(request(objective="speed"))


@pytest.mark.parametrize(
    ("objective", "winner", "refused"),
    [
        ("latency", "ours:gpu", {"ours:careful": "meant for determinism, not latency"}),
        ("throughput", "ours:wide", {"ours:careful": "meant for determinism, not throughput"}),
        ("portability", "ours:any", {"ours:gpu": "runs on cpu alone, and portability takes what runs on any platform"}),
        ("determinism", "ours:gpu", {"ours:wide": "meant for throughput, not determinism"}),
        ("debug", "builtin:torch", {"ours:any": "priority PORTABLE, and debug takes references"}),
    ],
)
def test_an_objective_leaves_out_what_is_not_meant_for_it(objective: str, winner: str, refused: dict[str, str]) -> None:
    kernels = registry(
        kernel("gpu", platforms=("cpu",), priority=Priority.PERFORMANT),
        kernel("wide", objectives=("throughput",), priority=Priority.SPECIALIZED),
        kernel("careful", objectives=("determinism",)),
        kernel("any"),
        objective=objective,
    )
    outcome = dict(kernels.explain(request()))
    assert next(iter(outcome)) == winner
    assert refused.items() <= outcome.items()


def test_an_objective_that_there_is_not_is_refused_when_the_registry_is_made() -> None:
    with pytest.raises(ConfigError, match="no objective is named 'latncy'; did you mean 'latency'"):
        registry(objective="latncy")


def test_equal_requests_get_the_same_object_and_a_factory_runs_once(parts: Any) -> None:
    pooled = kernel("pooled", factory=True, priority=Priority.PERFORMANT)
    contexts: list[str] = []

    def context(plugin: str) -> Any:
        contexts.append(plugin)
        return plugin

    kernels = registry(pooled, context_factory=context)
    first = kernels.select(request(shape={"m": 1, "n": 2}))
    assert first(0) == "pooled"
    assert kernels.select(request(shape={"n": 2, "m": 1})) is first
    assert kernels.select(request(dtype="bf16")) is first
    assert contexts == ["ours"]


def test_two_registries_of_one_process_build_their_own_kernels(parts: Any) -> None:
    pooled = kernel("pooled", factory=True, priority=Priority.PERFORMANT)
    made = [registry(pooled, context_factory=str).select(request()) for _ in range(2)]
    assert made[0] is not made[1]


@pytest.mark.parametrize(
    "sick", [{"target": "module_nobody_has:fast"}, {"target": "parts:sick_factory", "factory": True}]
)
def test_a_kernel_that_cannot_be_loaded_is_replaced_with_a_warning_that_names_both(
    parts: Any, caplog: Any, sick: dict[str, Any]
) -> None:
    fast = kernel("fast", priority=Priority.PERFORMANT, **sick)
    kernels = registry(fast, context_factory=str)
    with caplog.at_level(logging.WARNING):
        assert kernels.select(request())(0) == "torch"
    (text,) = [record.getMessage() for record in caplog.records]
    assert "builtin:torch is used instead of ours:fast" in text
    assert "cannot be loaded" in dict(kernels.explain(request()))["ours:fast"]
    with pytest.raises(PluginError):
        registry(fast, context_factory=str, overrides={"norm.rms_norm": "fast"}).select(request())


def test_a_setting_that_a_factory_refuses_is_not_passed_over(parts: Any) -> None:
    misled = kernel("misled", factory=True, priority=Priority.PERFORMANT)
    with pytest.raises(ConfigError, match="the file is of another card"):
        registry(misled, context_factory=str).select(request())


def test_when_everything_fails_to_load_the_first_cause_comes_first(parts: Any) -> None:
    only = KernelRegistry([kernel("fast", target="module_nobody_has:fast")], platform_name="cpu")
    with pytest.raises(PluginError) as error:
        only.select(request())
    assert str(error.value).startswith("ModuleNotFoundError")


def test_an_unknown_operation_names_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"did you mean 'norm\.rms_norm'"):
        registry().select(request(mode="rmsnorm"))


def test_explain_works_when_nothing_fits() -> None:
    only = KernelRegistry([kernel("fast", dtypes=("bf16",))], platform_name="cpu")
    assert only.explain(request()) == [("ours:fast", "takes bf16, not fp32")]

"""Measured kernels: what the file holds, and what the choice makes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tokenspeed.errors import ConfigError, PluginError
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.plugins import KernelSpec, Priority
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.plugins.kernel_times import KernelTimes, Measurement
from tokenspeed.plugins.registry import Contribution

SHAPE = {"n": 64, "k": 32}


def contribution(name: str, priority: Priority, **spec: object) -> Contribution[KernelSpec]:
    made = KernelSpec(name=name, family="gemm", mode="linear", target="nowhere:at_all", priority=priority, **spec)  # type: ignore[arg-type]
    return Contribution("p", made)


def measured(**us: float) -> Measurement:
    times = {f"p:{name}": value for name, value in us.items()}
    return Measurement(operation="gemm.linear", dtype="bf16", shape=SHAPE, rows=(1, 8), date="2026-11-29", us=times)


def registry(times: KernelTimes | None, overrides: dict[str, str] | None = None) -> KernelRegistry:
    kernels = [
        contribution("first", Priority.SPECIALIZED),
        contribution("second", Priority.PORTABLE),
        contribution("elsewhere", Priority.SPECIALIZED, platforms=("cuda",)),
        contribution("half", Priority.PORTABLE, dtypes=("fp16",)),
    ]
    return KernelRegistry(kernels, platform_name="cpu", times=times, overrides=overrides)


def request(**changes: object) -> KernelRequest:
    return KernelRequest(**{"family": "gemm", "mode": "linear", "dtype": "bf16", "shape": SHAPE, **changes})  # type: ignore[arg-type]


def test_the_fastest_of_those_that_fit_is_chosen_and_says_what_was_measured() -> None:
    kernels = registry(KernelTimes("here", [measured(first=20.0, second=10.0, elsewhere=1.0, half=2.0)]))
    choice = kernels.choose(request())
    assert choice.winner.name == "p:second"
    assert choice.why == "measured 10 us, p:first 20, on 2026-11-29"
    assert ("p:first", "measured 20 us") in kernels.explain(request())


@pytest.mark.parametrize(
    "asked", [{"dtype": "fp32"}, {"shape": {"n": 64, "k": 64}}], ids=["another type", "another shape"]
)
def test_other_requests_are_chosen_as_without_measurements(asked: dict[str, object]) -> None:
    kernels = registry(KernelTimes("here", [measured(first=20.0, second=10.0)]))
    assert kernels.choose(request(**asked)).winner.name == "p:first"


def test_pages_of_another_layout_or_type_are_another_request(tmp_path: Path) -> None:
    times = KernelTimes("here")
    for layout, kv, us in (("HND", "", 1.0), ("HND", "fp8", 2.0), ("NHD", "", 3.0)):
        times.add(dataclasses.replace(measured(first=us, second=9.0), layout=layout, kv=kv, each={"p:first": (us,)}))
    path = str(tmp_path / "times.json")
    times.save(path)
    loaded = KernelTimes.load(path, "here")
    found = [loaded.find("gemm.linear", "bf16", SHAPE, *asked) for asked in (("HND",), ("HND", "fp8"), ("NHD",), ())]
    assert [entry.us["p:first"] if entry else None for entry in found] == [1.0, 2.0, 3.0, None]
    assert found[1] is not None
    assert found[1].each == {"p:first": (2.0,)}
    kernels = registry(KernelTimes("here", [dataclasses.replace(measured(first=20.0, second=10.0), kv="fp8")]))
    fitting = {"features": frozenset({"kv_fp8"})}
    assert kernels.choose(request()).winner.name == "p:first"
    with pytest.raises(PluginError):
        kernels.choose(request(**fitting))  # none of these has the feature


def test_shapes_that_no_limit_tells_apart_are_chosen_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = KernelRegistry(
        [contribution("small", Priority.SPECIALIZED, traits=(("n", 1, 64),)), contribution("any", Priority.PORTABLE)],
        platform_name="cpu",
        times=KernelTimes("here", [measured(small=20.0, any=10.0)]),
    )
    made: list[str] = []

    def building(winner: Contribution[KernelSpec]) -> object:
        made.append(winner.name)
        return winner.name

    monkeypatch.setattr(kernels, "_build", building)
    sizes = [8, 16, 64, 65, 4096, 9, 70]
    assert [kernels.select(request(shape={"n": n, "k": 32})) for n in sizes] == [  # type: ignore[comparison-overlap]
        "p:small", "p:small", "p:any", "p:any", "p:any", "p:small", "p:any",
    ]  # fmt: skip
    # One for each side of the limit, and one for the shape that was measured.
    assert made == ["p:small", "p:any", "p:any"]


def test_one_time_alone_decides_nothing() -> None:
    assert registry(KernelTimes("here", [measured(second=10.0)])).choose(request()).winner.name == "p:first"


def test_an_override_stands_above_what_was_measured() -> None:
    times = KernelTimes("here", [measured(first=20.0, second=10.0)])
    assert registry(times, {"gemm.linear": "first"}).choose(request()).winner.name == "p:first"


def test_a_file_gives_its_figures_to_its_own_device_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "times.json")
    for key, us in (("one; torch 2.11", 5.0), ("two; torch 2.11", 7.0)):
        times = KernelTimes(key)
        times.add(measured(first=us, second=9.0))
        times.save(path)
    found = KernelTimes.load(path, "two; torch 2.11").find("gemm.linear", "bf16", {"k": 32, "n": 64})
    assert found is not None
    assert found.us == {"p:first": 7.0, "p:second": 9.0}
    assert len(KernelTimes.load(path, "two; torch 2.12")) == 0
    assert KernelTimes.devices(path) == ["one; torch 2.11", "two; torch 2.11"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"format": 2, "devices": {}}', "not written by `tokenspeed kernels bench --save`"),
        ('{"format": 1, "devices": {"here": [{"operation": "gemm.linear"}]}}', "lacks or misstates 'dtype'"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"times\.json") as error:
        KernelTimes.load(str(path), "here")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("elsewhere", "runs on cuda, not on cpu"),
        ("half", "takes fp16, not bf16"),
    ],
)
def test_an_override_that_cannot_run_is_refused_before_anything_is_loaded(solution: str, reason: str) -> None:
    with pytest.raises(PluginError, match=f"--kernel gemm.linear={solution} cannot be used: p:{solution} {reason}"):
        registry(None, {"gemm.linear": solution}).check_override("gemm.linear", "bf16")


def test_an_override_that_can_run_passes_whatever_the_sizes() -> None:
    spec = contribution("few", Priority.PORTABLE, traits=(("m", 1, 8),), objectives=("debug",))
    kernels = KernelRegistry([spec], platform_name="cpu", overrides={"gemm.linear": "few"})
    kernels.check_override("gemm.linear", "bf16")

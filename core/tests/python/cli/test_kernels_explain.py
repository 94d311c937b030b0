"""``tokenspeed kernels explain``: architectures by name, the backends of a phase of attention, and what a kernel tells of its inside."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenspeed.cli.kernels_explain import read_arch

BACKENDS = """
@hookimpl
def tokenspeed_attention_backends():
    def one(name, **supports):
        platforms = supports.pop("platforms", ("cuda",))
        return AttentionBackendSpec(name=name, target="m:B", platforms=platforms, priority=Priority.PERFORMANT,
                                    asks=supports.pop("asks", ()), supports=AttentionSupport(**supports))
    return [one("own", dtypes=("bf16",), sinks=True), one("latent", kinds=("mla",)),
            one("host", platforms=("cpu",), asks=("attention.decode",), phases=("decode",))]
"""


@pytest.mark.parametrize(
    ("text", "platform", "capability"),
    [
        ("sm_90", "cuda", (9, 0)),
        ("sm90a", "cuda", (9, 0)),
        ("sm_103", "cuda", (10, 3)),
        ("sm_120", "cuda", (12, 0)),
        ("gfx942", "rocm", (9, 4, 2)),
        ("gfx90a", "rocm", (9, 0, 10)),
        ("gfx1100", "rocm", (11, 0, 0)),
        ("cpu", "cpu", ()),
    ],
)
def test_an_architecture_is_a_platform_and_a_capability(text: str, platform: str, capability: tuple[int, ...]) -> None:
    assert read_arch(text) == (platform, capability)


@pytest.mark.parametrize("text", ["h100", "sm_9", "gfx9", ""])
def test_what_is_no_architecture_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no architecture"):
        read_arch(text)


def test_arch_gates_as_platform_and_capability_do_and_contradicts_them(run: Any, folder: Any) -> None:
    kernel = (
        "KernelSpec(name='b', family='norm', mode='rms_norm', target='m:k', platforms=('cuda',),"
        " capability=((10, 0), (10, 3)), priority=Priority.SPECIALIZED)"
    )
    folder.add("k", f"@hookimpl\ndef tokenspeed_kernels():\n    return [{kernel}]")
    asked = ("kernels", "explain", "norm.rms_norm", "--plugins", "k", "--dtype", "bf16")
    for arch in ("sm_100", "sm_103"):
        assert run(*asked, "--arch", arch).out.splitlines()[1].split()[:2] == ["k:b", "chosen:"]
    assert "capability 10.0 to 10.3, the device has 9.0" in run(*asked, "--arch", "sm_90").out
    assert "runs on cuda, not on rocm" in run(*asked, "--arch", "gfx942").out
    for flag, value in (("--platform", "cuda"), ("--capability", "10.0")):
        refused = run(*asked, "--arch", "sm_100", flag, value)
        assert (refused.code, f"{flag} {value}: --arch says that already" in refused.err) == (2, True)
    assert run(*asked, "--arch", "h100").code == 2


def test_the_backend_that_serves_a_phase_is_told_before_the_kernels(run: Any, folder: Any) -> None:
    """A backend that launches kernels of its own is no candidate for a kernel, and is what serves all the same."""
    folder.add("a", BACKENDS)
    asked = ("kernels", "explain", "attention.decode", "--plugins", "a")
    on_cuda = run(*asked, "--arch", "sm_90", "--dtype", "bf16")
    assert on_cuda.code == 0
    lines = [" ".join(line.split()) for line in on_cuda.out.splitlines()]
    assert lines[0] == "backends for decode (gqa, 32 query and 8 KV heads of 128, KV cache bf16):"
    assert lines[2].startswith("a:own serves decode: ")
    assert "a:latent supports mla, not gqa" in lines
    assert "a:own launches kernels of its own. A backend that asks for one would get:" in lines
    assert "builtin:torch chosen: the only one that fits" in lines
    here = " ".join(run(*asked).out.split())
    assert "a:host serves decode: " in here
    assert "a:host asks for a kernel attention.decode:" in here


@pytest.mark.parametrize(
    ("arguments", "winner", "gate"),
    [
        ("--dtype fp16", "builtin:torch", "takes bf16, not fp16"),
        ("--dtype bf16 --feature sinks", "a:own", ""),
        ("--dtype bf16 --feature window", "builtin:torch", "supports no sliding window"),
        ("--dtype bf16 --feature shared_prefix", "", "lacks shared_prefix"),
        ("--dtype bf16 --kind mla", "a:latent", "supports mha, gqa, not mla"),
        ("--dtype bf16 --shape q_heads=8 --shape kv_heads=8", "a:own", "supports mla, not mha"),
    ],
)
def test_what_is_asked_of_attention_gates_its_backends(
    run: Any, folder: Any, arguments: str, winner: str, gate: str
) -> None:
    folder.add("a", BACKENDS)
    asked = ("kernels", "explain", "attention.decode", "--plugins", "a", "--arch", "sm_90", "--json")
    outcome = run(*asked, *arguments.split())
    backends = {one["name"]: one["gate"] for one in json.loads(outcome.out) if one["is"] == "backend"}
    assert [name for name, reason in backends.items() if not reason] == ([winner] if winner else [])
    assert not gate or any(gate in reason for reason in backends.values())
    assert outcome.code == (0 if winner else 1)


def test_backends_are_listed_beside_the_kernels_of_attention_and_nowhere_else(run: Any, folder: Any) -> None:
    folder.add("a", BACKENDS)
    listed = [
        " ".join(line.split()) for line in run("kernels", "list", "attention.decode", "--plugins", "a").out.splitlines()
    ]
    assert "attention.decode a:host PLUGIN cpu any mha,gqa yes" in listed
    plain = json.loads(run("kernels", "list", "attention", "--plugins", "a", "--json").out)
    assert {"a:own", "a:latent"} <= {one["name"] for one in plain if one["is"] == "backend"}
    assert ("attention.extend", "a:host") not in {(one["operation"], one["name"]) for one in plain}
    assert "a:own" not in run("kernels", "list", "norm", "--plugins", "a").out


def test_a_kernel_tells_of_its_inside(run: Any, folder: Any) -> None:
    kernel = "KernelSpec(name='b', family='norm', mode='rms_norm', target='m:k', priority=Priority.SPECIALIZED, tells='inside_k:tell')"
    option = "OptionSpec(name='depth', type=int, default=3, help='x')"
    folder.add(
        "k",
        f"@hookimpl\ndef tokenspeed_kernels():\n    return [{kernel}]\n@hookimpl\ndef tokenspeed_options():\n    return [{option}]",
        modules={
            "inside_k": "def tell(capability, device, shape, options): return f'{capability} {device} {shape} {options}'"
        },
    )
    asked = ("kernels", "explain", "norm.rms_norm", "--plugins", "k", "--arch", "sm_90", "--shape", "hidden=8")
    told = run(*asked, "--set", "k.depth=5", "--device-name", "X1").out
    assert "k:b: (9, 0) X1 {'hidden': 8} {'depth': 5}" in told


@pytest.mark.parametrize(
    ("operation", "by_backends"),
    [
        ("attention.decode", True),
        ("recurrent.gated_linear", True),
        ("recurrent.copy", False),
        ("moe.experts", False),
        ("moe.route", False),
    ],
)
def test_kernels_that_backends_ask_for_are_told_from_those_of_layers(
    run: Any, operation: str, by_backends: bool
) -> None:
    told = run("kernels", "explain", operation, "--plugins", "none").out
    assert ("launched by the backend that asks for one" in told) is by_backends


def test_a_kind_of_attention_is_asked_of_attention_alone(run: Any) -> None:
    refused = run("kernels", "explain", "norm.rms_norm", "--plugins", "none", "--kind", "mla")
    assert (refused.code, "is not of family attention" in refused.err) == (2, True)


def test_the_objective_of_serve_is_what_explain_shows(run: Any) -> None:
    asked = ("explain", "toy", "--device", "cpu", "--plugins", "none")
    assert "kernels for       debug (--kernel-objective)" in run(*asked, "--kernel-objective", "debug").out
    assert "kernels for" not in run(*asked).out
    refused = run(*asked, "--kernel-objective", "dbug")
    assert (refused.code, "did you mean 'debug'" in refused.err) == (2, True)

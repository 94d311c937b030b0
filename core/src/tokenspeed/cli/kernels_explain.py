"""``tokenspeed kernels explain``: which kernel an operation gets, which backend serves a phase of attention, and what refused each other."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenspeed.cli.arguments import argument_type, plugin_settings
from tokenspeed.cli.table import columns
from tokenspeed.engine.attention_choice import PHASES, AttentionUse, choose_backends
from tokenspeed.engine.settings import DTYPES, KV_DTYPES, AttentionShape
from tokenspeed.errors import ConfigError, NothingFitsError
from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.interfaces.platform import PlatformContext
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.plugins.kernel_times import KernelTimes
from tokenspeed.plugins.manager import PluginHost
from tokenspeed.plugins.options import resolve_options
from tokenspeed.plugins.registry import Contribution
from tokenspeed.plugins.selection import Choice, load_target
from tokenspeed.plugins.specs import AttentionBackendSpec, KernelSpec

__all__ = ["KINDS", "add_target_arguments", "explain", "read_arch", "target_of"]

#: Families that backends ask for, and no layer.
_ASKED_BY_BACKENDS = ("attention", "recurrent")
#: But these, which the KV pool asks for.
_ASKED_BY_THE_POOL = ("recurrent.copy", "recurrent.zero")
KINDS = ("mha", "gqa", "mla")
_HEADS = {"mha": (32, 32, 128), "gqa": (32, 8, 128), "mla": (128, 1, 576)}
_SM = re.compile(r"sm_?(\d+)(\d)[af]?")
_GFX = re.compile(r"gfx(\d+)([0-9a-f])([0-9a-f])")

Lines = list[tuple[str, str]]


def read_arch(text: str) -> tuple[str, tuple[int, ...]]:
    """Platform and capability of an architecture as compilers name it: ``sm_100`` is ``cuda`` of (10, 0), ``gfx942`` is ``rocm`` of (9, 4, 2).

    Raises:
        ValueError: with a phrase.
    """
    if text == "cpu":
        return "cpu", ()
    if found := _SM.fullmatch(text):
        return "cuda", (int(found[1]), int(found[2]))
    if found := _GFX.fullmatch(text):
        return "rocm", (int(found[1]), int(found[2], 16), int(found[3], 16))
    raise ValueError(
        f"no architecture {text!r}; write sm_90, sm_100, sm_103, sm_120, gfx942, gfx950 or the like, or cpu"
    )


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """``--arch``, and the two flags that it stands for."""
    parser.add_argument(
        "--arch",
        default=None,
        type=argument_type(read_arch),
        metavar="ARCH",
        help="architecture to choose for, which need not be present: sm_100, gfx942, cpu; short for --platform and --capability",
    )
    parser.add_argument(
        "--platform", default=None, metavar="NAME", help="platform to choose for; need not be present (default: cpu)"
    )
    parser.add_argument("--capability", default="", metavar="X.Y", help="its device's capability, for example 9.0")


def target_of(args: argparse.Namespace) -> tuple[str, tuple[int, ...]]:
    """(platform, capability) of the flags. Raises ``ConfigError`` where they contradict each other."""
    parts = args.capability.split(".") if args.capability else []
    if not all(part.isdigit() for part in parts):
        raise ConfigError(f"--capability {args.capability}: write numbers with dots, for example 9.0")
    if args.arch is None:
        return args.platform or "cpu", tuple(int(part) for part in parts)
    for flag, given in (("--platform", args.platform), ("--capability", args.capability)):
        if given:
            raise ConfigError(f"{flag} {given}: --arch says that already; give one or the other")
    platform, capability = args.arch
    return platform, capability


def explain(
    host: PluginHost, kernels: list[Contribution[KernelSpec]], request: KernelRequest, args: argparse.Namespace
) -> int:
    """Print the answer; 1 where nothing fits."""
    platform, capability = target_of(args)
    if args.kind and request.family != "attention":
        raise ConfigError(f"--kind {args.kind}: {args.operation} is not of family attention")
    registry = KernelRegistry(
        kernels,
        platform_name=platform,
        capability=capability,
        overrides={args.operation: args.solution} if args.solution else {},
        active=host.active,
        times=_times(args),
    )
    outcome = registry.explain(request)
    found = any(not gate for _, gate in outcome)
    why = registry.choose(request).why if found else ""
    backends = _backends(host, request, platform, args) if request.family == "attention" else None
    if args.json:
        plain = [{"name": name, "gate": gate, "is": "kernel"} for name, gate in outcome]
        plain += [{"name": name, "gate": gate, "is": "backend"} for name, gate in backends[1]] if backends else []
        print(json.dumps(plain, indent=2))
    else:
        if backends:
            _print_backends(args.operation, *backends)
        shown = [(name, f"chosen: {why}" if found and not i else gate) for i, (name, gate) in enumerate(outcome)]
        print(columns(("KERNEL", "OUTCOME"), shown))
        if found:
            _print_inside(host, registry, request, capability, args)
        if request.family in _ASKED_BY_BACKENDS and args.operation not in _ASKED_BY_THE_POOL:
            print(
                f"\n{request.family} kernels are launched by the backend that asks for one; tokenspeed explain MODEL says which backend that is"
            )
    return 0 if (backends[0] is not None if backends else found) else 1


def _backends(
    host: PluginHost, request: KernelRequest, platform: str, args: argparse.Namespace
) -> tuple[Choice[AttentionBackendSpec] | None, Lines, str]:
    """(choice of the phase, each backend with what refused it, what was asked for), as ``serve`` chooses without a flag or a need of the model."""
    kind = args.kind or ("mha" if request.shape.get("q_heads", 0) == request.shape.get("kv_heads", -1) else "gqa")
    q_heads, kv_heads, head_dim = (
        request.shape.get(name, usual)
        for name, usual in zip(("q_heads", "kv_heads", "head_dim"), _HEADS[kind], strict=True)
    )
    kv_short = next((name[3:] for name in sorted(request.features) if name.startswith("kv_")), request.dtype)
    names = {short: long for long, short in KV_DTYPES.items()}
    if kv_short not in names:
        raise ConfigError(f"--feature kv_{kv_short}: a KV cache holds {', '.join(names)}")
    shape = AttentionShape(
        kind=kind,
        head_dim=head_dim,
        q_heads=q_heads,
        kv_heads=kv_heads,
        window="window" in request.features,
        softcap="softcap" in request.features,
    )
    long = {short: long for long, short in DTYPES.items()}
    use = AttentionUse(
        shape=shape, dtype=long[request.dtype], kv_dtype=names[kv_short], page_size=request.shape.get("page_size")
    )
    asked = f"{kind}, {q_heads} query and {kv_heads} KV heads of {head_dim}, KV cache {kv_short}"
    try:
        chosen = choose_backends(host, use, platform, _preferences(host, platform), also=lambda s: _also(s, request))
    except NothingFitsError as error:
        return None, list(error.refused), asked
    choice = chosen[request.mode if request.mode in PHASES else "decode"]
    lines = [(choice.winner.name, ""), *((loser.name, loser.reason) for loser in choice.losers)]
    return choice, lines, asked


def _also(spec: AttentionBackendSpec, request: KernelRequest) -> str:
    """Gates on what a request of the command line asks besides what a model does."""
    if request.layout and request.layout not in spec.supports.layouts:
        return f"takes layout {', '.join(spec.supports.layouts)}, not {request.layout}"
    for name in sorted(request.features):
        if name in ("window", "softcap") or name.startswith("kv_"):
            continue
        if not getattr(spec.supports, name, False):
            return f"lacks {name}"
    return ""


def _preferences(host: PluginHost, platform: str) -> Callable[[str], Sequence[str]]:
    """The platform's own order; none where no active plugin has the platform."""
    for c in host.registry.specs("platform"):
        if c.spec.name == platform:
            order: Callable[[str], Sequence[str]] = load_target(c.spec.target)(PlatformContext()).preferences
            return order
    return lambda _: ()


def _print_backends(operation: str, choice: Choice[AttentionBackendSpec] | None, lines: Lines, asked: str) -> None:
    phase = operation.partition(".")[2]
    print(f"backends for {phase} ({asked}):")
    rows = [(name, f"serves {phase}: {choice.why}" if choice and not i else why) for i, (name, why) in enumerate(lines)]
    print(columns(("BACKEND", "OUTCOME"), rows))
    if choice is None:
        print(f"no backend serves {phase} there\n")
    elif operation in choice.spec.asks:
        print(f"{choice.winner.name} asks for a kernel {operation}:\n")
    else:
        print(f"{choice.winner.name} launches kernels of its own. A backend that asks for one would get:\n")


def _print_inside(
    host: PluginHost,
    registry: KernelRegistry,
    request: KernelRequest,
    capability: tuple[int, ...],
    args: argparse.Namespace,
) -> None:
    """What the chosen kernel tells of its inside."""
    winner = registry.choose(request).winner
    if not winner.spec.tells:
        return
    options = _options(host, args).get(winner.plugin, {})
    text: str = load_target(winner.spec.tells)(capability, args.device_name, request.shape, options)
    if text:
        print(f"\n{winner.name}: " + "\n  ".join(text.splitlines()))


def _options(host: PluginHost, args: argparse.Namespace) -> Mapping[str, Mapping[str, Any]]:
    _, given, _ = plugin_settings(args)
    inactive = [name for name in host.discovery.names() if name not in host.active]
    return resolve_options(host.registry.specs("option"), given, [*inactive, *host.active])


def _times(args: argparse.Namespace) -> KernelTimes | None:
    if args.kernel_times is None:
        return None
    known = KernelTimes.devices(args.kernel_times)
    times = KernelTimes.load(args.kernel_times, args.device_name or (known[0] if len(known) == 1 else ""))
    if not len(times):
        raise ConfigError(
            f"--device-name {args.device_name or '(none)'}: {args.kernel_times} has figures of: {' | '.join(known)}"
        )
    return times

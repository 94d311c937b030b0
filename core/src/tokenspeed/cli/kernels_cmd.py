"""``tokenspeed kernels``: list kernels, explain which one an operation gets (neither needs a device or torch), and time them.

An operation, ``FAMILY.MODE``, is what a layer or a backend asks a kernel for. Which backend a model is served with is ``tokenspeed explain``'s to say.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from tokenspeed.cli.arguments import add_plugin_arguments, argument_type, plugin_settings
from tokenspeed.cli.kernels_explain import KINDS, add_target_arguments, explain
from tokenspeed.cli.readers import dtype
from tokenspeed.cli.table import columns
from tokenspeed.engine.settings import DTYPES
from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kernel import OBJECTIVES, KernelRequest
from tokenspeed.plugins.manager import PluginHost
from tokenspeed.plugins.names import did_you_mean
from tokenspeed.plugins.registry import Contribution
from tokenspeed.plugins.specs import KERNEL_FAMILIES, AttentionBackendSpec, KernelSpec

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands."""
    parser.description = (
        "Kernels are what layers and backends launch, one for each operation (FAMILY.MODE, such as attention.decode). "
        "What a model is served with, and which attention backend, is shown by: tokenspeed explain MODEL."
    )
    commands = parser.add_subparsers(dest="kernels_command", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="every kernel of every active plugin")
    listing.add_argument("operation", nargs="?", metavar="FAMILY[.MODE]", help="only these")
    explaining = commands.add_parser(
        "explain",
        help="which kernel one operation gets, and the gate that refused each other; no model is asked about",
        description="Which kernel a layer or backend gets that asks for one operation, and the gate that refused each other. "
        "For attention also which backend serves the phase, since most backends launch kernels of their own. "
        "The platform need not be present. For what a model is served with: tokenspeed explain MODEL.",
    )
    bench = commands.add_parser(
        "bench", help="time every kernel that can serve an operation on the device that is here"
    )
    for command in (explaining, bench):
        command.add_argument("operation", metavar="FAMILY.MODE", help="for example norm.rms_norm; see kernels list")
        command.add_argument(
            "--dtype",
            default="fp32",
            type=argument_type(_dtype),
            metavar="{" + ",".join(DTYPES.values()) + "}",
            help="element type; the names of serve --dtype too (default: %(default)s)",
        )
        command.add_argument(
            "--shape", action="append", default=[], metavar="NAME=N", help="a size the caller knows; may be given again"
        )
        command.add_argument(
            "--layout", default="", choices=("", "NHD", "HND"), help="KV layout, where one is involved"
        )
        command.add_argument(
            "--feature",
            action="append",
            default=[],
            metavar="NAME",
            help="an ability the caller needs, such as kv_fp8; may be given again",
        )
    bench.add_argument("--rows", default="1,8,64", metavar="N,N", help="row counts to time (default: %(default)s)")
    bench.add_argument("--device", default="auto", help="as for serve (default: %(default)s)")
    bench.add_argument("--save", metavar="FILE", help="keep the figures there, for serve --kernel-times")
    explaining.add_argument("--objective", default="latency", choices=OBJECTIVES, help="default: %(default)s")
    explaining.add_argument(
        "--kind", default=None, choices=KINDS, help="of attention (default: by the heads, else gqa)"
    )
    add_target_arguments(explaining)
    explaining.add_argument("--solution", default=None, metavar="NAME", help="as with --kernel FAMILY.MODE=NAME")
    explaining.add_argument("--kernel-times", default=None, metavar="FILE", help="as for serve")
    explaining.add_argument(
        "--device-name",
        default="",
        metavar="NAME",
        help="whose figures, where the file has those of several; which card's tiles",
    )
    for command in (listing, explaining, bench):
        add_plugin_arguments(command)
        command.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run a sub-command; ``explain`` returns 1 when no kernel fits."""
    text, _, source = plugin_settings(args)
    host = PluginHost.load(text, source=source)
    kernels = host.registry.specs("kernel")
    if args.kernels_command == "list":
        return _list(kernels, host.registry.specs("attention_backend"), args)
    request = _request(args)
    _check_operation(args.operation, [f"{c.spec.family}.{c.spec.mode}" for c in kernels])
    if args.kernels_command == "explain":
        return explain(host, kernels, request, args)
    from tokenspeed.cli.kernels_bench import bench

    return bench(host, request, _rows(args.rows), args)


def _list(
    kernels: list[Contribution[KernelSpec]],
    backends: list[Contribution[AttentionBackendSpec]],
    args: argparse.Namespace,
) -> int:
    wanted = args.operation or ""
    chosen = [c for c in kernels if wanted in ("", c.spec.family, f"{c.spec.family}.{c.spec.mode}")]
    if not chosen:
        family, _, mode = wanted.partition(".")
        operations = {f"{c.spec.family}.{c.spec.mode}" for c in kernels}
        hint = did_you_mean(wanted, operations if mode else {c.spec.family for c in kernels})
        raise ConfigError(f"no active plugin has a kernel for {wanted or 'anything'}{hint}{_families(family)}")
    chosen.sort(key=lambda c: (c.spec.family, c.spec.mode, -c.priority, c.name))
    serving = [
        (f"attention.{phase}", c)
        for phase in ("decode", "extend")
        for c in sorted(backends, key=lambda c: (-c.priority, c.name))
        if phase in c.spec.supports.phases and wanted in ("", "attention", f"attention.{phase}")
    ]
    if args.json:
        print(json.dumps([*map(_plain, chosen), *(_plain_backend(phase, c) for phase, c in serving)], indent=2))
        return 0
    rows = [
        (
            f"{c.spec.family}.{c.spec.mode}",
            c.name,
            c.priority.name,
            ",".join(c.spec.platforms) or "any",
            ",".join(c.spec.dtypes) or "any",
            ",".join(sorted(c.spec.features)),
        )
        for c in chosen
    ]
    print(columns(("OPERATION", "KERNEL", "PRIORITY", "PLATFORMS", "DTYPES", "FEATURES"), rows))
    if serving:
        print("\nbackends of attention, which launch kernels of their own unless they ask for one of the above:")
        told = [
            (
                operation,
                c.name,
                c.priority.name,
                ",".join(c.spec.platforms) or "any",
                ",".join(c.spec.supports.dtypes) or "any",
                ",".join(c.spec.supports.kinds),
                "yes" if operation in c.spec.asks else "no",
            )
            for operation, c in serving
        ]
        print(columns(("PHASE", "BACKEND", "PRIORITY", "PLATFORMS", "DTYPES", "KINDS", "ASKS"), told))
    return 0


def _plain(c: Contribution[KernelSpec]) -> dict[str, Any]:
    spec = c.spec
    return {
        "operation": f"{spec.family}.{spec.mode}",
        "is": "kernel",
        "name": c.name,
        "target": spec.target,
        "priority": c.priority.name,
        "platforms": list(spec.platforms),
        "capability": [list(bound) for bound in spec.capability] if spec.capability else None,
        "dtypes": list(spec.dtypes),
        "layouts": list(spec.layouts),
        "features": sorted(spec.features),
        "traits": [list(trait) for trait in spec.traits],
        "objectives": list(spec.objectives),
        "off": c.off,
    }


def _plain_backend(operation: str, c: Contribution[AttentionBackendSpec]) -> dict[str, Any]:
    spec, supports = c.spec, c.spec.supports
    return {
        "operation": operation,
        "is": "backend",
        "name": c.name,
        "target": spec.target,
        "priority": c.priority.name,
        "platforms": list(spec.platforms),
        "dtypes": list(supports.dtypes),
        "layouts": list(supports.layouts),
        "kinds": list(supports.kinds),
        "asks": list(spec.asks),
        "off": c.off,
    }


def _request(args: argparse.Namespace) -> KernelRequest:
    family, dot, mode = args.operation.partition(".")
    if not dot or not mode:
        raise ConfigError(
            f"kernels {args.kernels_command} {args.operation}: write FAMILY.MODE, for example norm.rms_norm; "
            "`tokenspeed kernels list` shows every operation"
        )
    plain = args.kernels_command == "bench"
    return KernelRequest(
        family=family,
        mode=mode,
        dtype=args.dtype,
        layout=args.layout,
        features=frozenset(args.feature),
        shape=_shape(args.shape),
        objective="latency" if plain else args.objective,
    )


def _families(family: str) -> str:
    return "" if family in KERNEL_FAMILIES else f"; families are {', '.join(KERNEL_FAMILIES)}"


def _check_operation(operation: str, known: list[str]) -> None:
    """Raises ``ConfigError`` for an operation that no active kernel serves, naming the nearest."""
    if operation in known:
        return
    family = operation.partition(".")[0]
    hint = did_you_mean(operation, known)
    if family not in KERNEL_FAMILIES:
        hint = did_you_mean(family, KERNEL_FAMILIES) or hint
        raise ConfigError(f"{operation}: no family of kernels is named {family!r}{hint}{_families(family)}")
    text = f"{operation}: no active plugin has a kernel for it{hint}; `tokenspeed kernels list` shows every operation"
    raise ConfigError(text)


def _dtype(text: str) -> str:
    """Reads a short name of an element type, or one that ``serve --dtype`` takes."""
    name = DTYPES.get(dtype(text), text)
    if name not in DTYPES.values():
        hint = did_you_mean(text, [*DTYPES.values(), *DTYPES])
        raise ValueError(f"no element type {text!r}{hint} (choose from {', '.join((*DTYPES.values(), *DTYPES))})")
    return name


def _rows(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--rows {text}: write numbers with commas, for example 1,8,64")
    return [int(part) for part in parts]


def _shape(items: list[str]) -> dict[str, int]:
    shape = {}
    for item in items:
        name, equals, size = item.partition("=")
        if not equals or not size.isdigit():
            raise ConfigError(f"--shape {item}: write NAME=N, for example head_dim=64")
        shape[name] = int(size)
    return shape

"""``tokenspeed kernels bench``: every candidate for an operation, timed on the device that is here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from tokenspeed.cli.table import columns
from tokenspeed.errors import ConfigError, PluginError
from tokenspeed.interfaces.kernel import KernelContext, KernelRequest
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.plugins.kernel_times import KernelTimes, Measurement, device_key
from tokenspeed.plugins.manager import PluginHost
from tokenspeed.plugins.options import resolve_options

__all__ = ["bench"]

_LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}


def bench(host: PluginHost, request: KernelRequest, rows: list[int], args: argparse.Namespace) -> int:
    """Time, print, and with ``--save`` keep; 1 where no candidate can run."""
    import torch

    from tokenspeed.benchmark.kernel_inputs import PAGED, arguments_for, asked_shape, sizes_of
    from tokenspeed.benchmark.kernels import time_calls
    from tokenspeed.config import EngineConfig
    from tokenspeed.engine import choices

    operation = f"{request.family}.{request.mode}"
    sizes = sizes_of(operation, request.shape)  # refuses what cannot be timed
    kv = _page_type(operation, operation in PAGED, request)
    layout = (request.layout or "NHD") if operation in PAGED else ""
    request = dataclasses.replace(request, shape=asked_shape(operation, request.shape), layout=layout)
    host.registry.freeze()
    chosen = choices.choose_platform(host, args.device, list)
    options = resolve_options(host.registry.specs("option"), {}, list(host.active))
    platform = choices.make_platform(chosen, EngineConfig(model="none"), options)
    platform.init_process()
    device = platform.device
    dtype, pages_dtype = getattr(torch, _LONG[request.dtype]), getattr(torch, _LONG[kv or request.dtype])

    def arguments(rows: int) -> list[Any]:
        return arguments_for(operation, rows, sizes, dtype, device, layout=layout or "NHD", pages_dtype=pages_dtype)

    shared: dict[str, object] = {}
    registry = KernelRegistry(
        host.registry.specs("kernel"),
        platform_name=chosen.spec.name,
        capability=platform.capability,
        context_factory=lambda plugin: KernelContext(
            device=device, threads=torch.get_num_threads(), shared=shared, options=options.get(plugin, {})
        ),
        active=host.active,
    )
    found: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    for name, gate in registry.candidates(request).items():
        if gate:
            refused[name] = gate
            continue
        try:
            kernel = registry.build(name, operation)
            found[name] = [
                time_calls(kernel, lambda n=n: arguments(n), device)  # type: ignore[misc]
                for n in rows
            ]
        except (PluginError, RuntimeError) as error:
            refused[name] = str(error).splitlines()[0]
    times = {name: round(sum(us), 2) for name, us in found.items()}
    if args.save and times:
        key = device_key(platform.describe())
        kept = KernelTimes.load(args.save, key) if Path(args.save).exists() else KernelTimes(key)
        kept.add(
            Measurement(
                operation=operation,
                dtype=request.dtype,
                shape=request.shape,
                rows=tuple(rows),
                date=time.strftime("%Y-%m-%d"),
                us=times,
                each={name: tuple(round(one, 2) for one in us) for name, us in found.items()},
                layout=layout,
                kv=kv,
            )
        )
        kept.save(args.save)
    if args.json:
        print(json.dumps({"device": platform.describe(), "rows": rows, "us": found, "refused": refused}, indent=2))
    else:
        pages = f", {layout} pages of {kv or request.dtype}" if layout else ""
        told = ", ".join(f"{name}={size}" for name, size in sizes.items())
        print(f"{platform.describe()}; {request.dtype}{pages}; {told}; us a call")
        table = [(name, *(f"{us:.2f}" for us in found[name]), "") for name in sorted(found, key=lambda n: times[n])]
        table += [(name, *["-"] * len(rows), why) for name, why in refused.items()]
        print(columns(("KERNEL", *(f"{n} ROWS" for n in rows), "REFUSED"), table))
    return 0 if found else 1


def _page_type(operation: str, paged: bool, request: KernelRequest) -> str:
    """The element type of pages where it is another than ``dtype``. Raises ``ConfigError`` for what bench does not time."""
    for name in sorted(request.features):
        if not name.startswith("kv_") or name[3:] not in _LONG or not paged:
            raise ConfigError(
                f"--feature {name}: bench times {operation} without it; of operations on pages it takes kv_fp8, kv_bf16 and the like"
            )
    if request.layout and not paged:
        raise ConfigError(f"--layout {request.layout}: {operation} has no KV pages")
    kv = next((name[3:] for name in request.features), "")
    return "" if kv == request.dtype else kv

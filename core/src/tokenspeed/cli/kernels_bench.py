"""``tokenspeed kernels bench``: every candidate for an operation, timed on the device that is here."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tokenspeed.cli.table import columns
from tokenspeed.errors import PluginError
from tokenspeed.interfaces.kernel import KernelContext, KernelRequest
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.plugins.kernel_times import KernelTimes, Measurement, device_key
from tokenspeed.plugins.manager import PluginHost
from tokenspeed.plugins.options import resolve_options

__all__ = ["bench"]

_LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def bench(host: PluginHost, request: KernelRequest, rows: list[int], args: argparse.Namespace) -> int:
    """Time, print, and with ``--save`` keep; 1 where no candidate can run."""
    import torch

    from tokenspeed.benchmark.kernels import SIZES, arguments_for, time_calls
    from tokenspeed.config import EngineConfig
    from tokenspeed.engine import choices

    host.registry.freeze()
    chosen = choices.choose_platform(host, args.device, list)
    options = resolve_options(host.registry.specs("option"), {}, list(host.active))
    platform = choices.make_platform(chosen, EngineConfig(model="none"), options)
    platform.init_process()
    device = platform.device
    operation = f"{request.family}.{request.mode}"
    dtype = getattr(torch, _LONG[request.dtype])
    arguments_for(operation, 1, request.shape, dtype, torch.device("meta"))  # refuses what cannot be timed
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
                time_calls(kernel, lambda n=n: arguments_for(operation, n, request.shape, dtype, device), device)  # type: ignore[misc]
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
            )
        )
        kept.save(args.save)
    if args.json:
        print(json.dumps({"device": platform.describe(), "rows": rows, "us": found, "refused": refused}, indent=2))
    else:
        sizes = {**SIZES[operation], **request.shape}
        print(f"{platform.describe()}; {request.dtype}; {', '.join(f'{k}={v}' for k, v in sizes.items())}; us a call")
        table = [(name, *(f"{us:.2f}" for us in found[name]), "") for name in sorted(found, key=lambda n: times[n])]
        table += [(name, *["-"] * len(rows), why) for name, why in refused.items()]
        print(columns(("KERNEL", *(f"{n} ROWS" for n in rows), "REFUSED"), table))
    return 0 if found else 1

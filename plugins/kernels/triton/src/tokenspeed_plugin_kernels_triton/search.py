"""``tokenspeed tune-gemm``: searches tile shapes of the small-m products on the present device and prints TB/s beside the vendor's library.

Each configuration is timed in a captured graph over distinct weights, many times what the L2 cache holds. Everything is compiled and compared with the library
before, by as many processes as there are processors and the device's free memory has room for; a process that dies ends the search. The file that ``--out``
names holds the evidence; ``serve --set kernels-triton.tiles=FILE`` takes its tiles, on this card alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed.errors import ConfigError, EngineError
from tokenspeed_plugin_kernels_triton.tuning import MAX_ROWS, GemmConfig

if TYPE_CHECKING:
    import torch

    from tokenspeed_plugin_kernels_triton.gemm import SmallGemm

__all__ = ["add_arguments", "candidates", "read_shape", "run"]

#: rows of the weight, columns, whether it is a gate-up weight with its activation
Shape = tuple[int, int, bool]
#: The products of an 8B model: qkv, o, down, gate-up, head.
_SHAPES: tuple[Shape, ...] = (
    (6144, 4096, False),
    (4096, 4096, False),
    (4096, 12288, False),
    (24576, 4096, True),
    (151936, 4096, False),
)


#: Bytes of the device that a process takes beside weights: its context, kernels and the allocator's blocks.
_PROCESS = 1 << 30


def read_shape(text: str) -> Shape:
    """Reads ``6144x4096``, or ``24576x4096:gated`` of gate and up rows. Raises ``argparse.ArgumentTypeError`` with a phrase."""
    found = re.fullmatch(r"(\d+)x(\d+)(:gated)?", text)
    if not found or int(found[1]) < 16 or int(found[2]) < 64 or (found[3] and int(found[1]) % 2):
        raise argparse.ArgumentTypeError(
            f"no shape {text!r}; write ROWSxCOLUMNS of a weight, for example 6144x4096, or 24576x4096:gated"
        )
    return int(found[1]), int(found[2]), bool(found[3])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = (
        "Search tiles of products of 1 to 32 rows on this device's own memory. Takes some minutes, and the device for itself. "
        "serve --set kernels-triton.tiles=FILE takes what was found."
    )
    parser.add_argument(
        "--shape", action="append", type=read_shape, metavar="NxK[:gated]",
        help="a weight's rows and columns; may be given again (default: those of an 8B model)",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32], metavar="N", help="default: 1 8 32")
    parser.add_argument("--seconds", type=float, default=240, help="of timing; what is left over is not timed")
    parser.add_argument("--out", metavar="FILE", help="file to write, with the evidence")


def graph_time(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Microseconds a call of a captured graph of ``calls``: the median."""
    import torch

    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return float(statistics.median(times[1:]))


def one_row() -> Iterator[GemmConfig]:
    """Tiles for one row: sums over the elements of a program, of one tile or of several programs in one block."""
    for bn, bk, warps in itertools.product((1, 2, 4, 8, 16, 32), (256, 512, 1024, 2048, 4096), (1, 2, 4, 8)):
        each = bn * bk // (32 * warps)
        if bk // (32 * warps) < 8 or not 16 <= each <= 128:
            continue
        if each >= 32:
            yield GemmConfig(1, bn, bk, 1, warps, 1)
            if bk < 4096 and bn * bk <= 16384:
                yield GemmConfig(1, bn, bk, 1, warps, 4)
        if bk < 4096 and each <= 64:
            yield GemmConfig(1, bn, bk, 1, warps, 1, ahead=1)
    for bn, warps, programs in itertools.product((1, 2, 4), (2, 4, 8), (1, 2, 3, 4, 6, 8)):
        if 16 <= bn * 4096 // (32 * warps) <= 128 and warps * programs >= 8 and warps * programs <= 32:
            yield GemmConfig(1, bn, 4096, 1, warps, 1, programs=programs)


def few_rows(bm: int) -> Iterator[GemmConfig]:
    """Tiles of ``bm`` rows for the matrix units."""
    for bn, bk, split, stages, ahead in itertools.product((32, 64, 128), (64, 128, 256), (1, 2, 4), (3, 4, 6), (0, 3)):
        if (bn + bm) * bk * 2 * stages <= 200_000 and bn * bk * stages >= 24576 and bn * bk <= 16384:
            yield GemmConfig(bm, bn, bk, split, 4, stages, ahead=ahead)


def fits(cfg: GemmConfig, n: int, k: int, gated: bool) -> bool:
    """Whether ``cfg`` divides a weight (n, k) and is worth a try; ``gated``: it computes the activation too."""
    rows = n // 2 if gated else n
    if gated and (cfg.split_k > 1 or cfg.bn * cfg.bk // (32 * cfg.warps) > 64):
        return False
    if cfg.programs and k > 4096:
        return False
    return k % (cfg.bk * cfg.split_k) == 0 and rows % cfg.bn == 0 and not (n > 20000 and cfg.split_k > 1)


def candidates(m: int, shapes: Sequence[Shape], limit: int) -> list[tuple[Shape, GemmConfig]]:
    """(shape, configuration) for ``m`` rows on a device that gives a program ``limit`` bytes of shared memory."""
    some = list(one_row()) + list(few_rows(16)) if m == 1 else list(few_rows(16 if m <= 16 else 32))
    return [
        ((n, k, gated), cfg)
        for n, k, gated in shapes
        for cfg in some
        if cfg.shared_bytes <= limit
        and fits(cfg, n, k, gated and cfg.bm == 1)
        and not (n > 100000 and (cfg.bm > 1) and m == 1)
    ]


def reference(x: torch.Tensor, w: torch.Tensor, gated: bool) -> torch.Tensor:
    """The library's product of x (m, k) and w (n, k), (m, n), or with ``gated`` what the activation makes of it, (m, n / 2)."""
    import torch

    from tokenspeed_plugin_kernels_triton.activation import silu_and_mul

    product = torch.nn.functional.linear(x, w)
    return silu_and_mul(product) if gated else product


def run_of(gemm: SmallGemm, gated: bool, cfg: GemmConfig, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What ``reference`` computes of ``x`` and a weight, by one configuration."""
    from tokenspeed_plugin_kernels_triton.activation import silu_and_mul

    if gated and cfg.bm > 1:
        return lambda w: silu_and_mul(gemm(x, w, config=cfg))
    return lambda w: gemm(x, w, config=cfg, gated=gated)


def prepare(part: int, parts: int, rows: Sequence[int], shapes: Sequence[Shape], wrong: str) -> None:
    """Compile a share of the candidates and compare each with the library; what fails is listed in the file ``wrong``."""
    import torch

    from tokenspeed_plugin_kernels_triton.gemm import SmallGemm

    gemm, generator = SmallGemm(torch.device("cuda")), torch.Generator("cuda").manual_seed(0)
    failed = []
    for m in rows:
        weights: dict[Shape, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for number, (shape, cfg) in enumerate(candidates(m, shapes, gemm.tuning.limit)):
            if hash((cfg, shape[2] and cfg.bm == 1)) % parts != part:
                continue
            if shape not in weights:
                n, k, gated = shape
                w = torch.randn(n, k, dtype=torch.bfloat16, device="cuda", generator=generator) * 0.02
                x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda", generator=generator)
                weights = {shape: (x, w, reference(x, w, gated))}
            x, w, wanted = weights[shape]
            try:
                torch.testing.assert_close(run_of(gemm, shape[2], cfg, x)(w), wanted, atol=3e-2, rtol=3e-2)
            except torch.OutOfMemoryError:  # the device's state and not the configuration's fault
                raise
            except Exception as error:  # a configuration that needs too much of something is not a candidate
                failed.append((m, number, f"{shape} {cfg}: {type(error).__name__} {str(error)[:200]}"))
    Path(f"{wrong}.{part}").write_text(json.dumps(failed))


def processes(shapes: Sequence[Shape], processors: int, free: int) -> int:
    """How many processes compile at once on a device with ``free`` bytes: each may hold the largest weight, and once more while it is filled."""
    each = _PROCESS + max(2 * n * k * 2 for n, k, _ in shapes)
    return max(1, min(processors, free // each))


def compiled(rows: Sequence[int], shapes: Sequence[Shape], parts: int) -> dict[tuple[int, int], str]:
    """Compile every candidate in ``parts`` processes of their own. Returns why some cannot be used, by rows and number.

    Raises:
        EngineError: a process died, so that its share was compared with nothing.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        wrong = str(Path(folder, "wrong"))
        workers = [context.Process(target=prepare, args=(part, parts, rows, shapes, wrong)) for part in range(parts)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if dead := [worker.exitcode for worker in workers if worker.exitcode]:
            raise EngineError(
                f"tune-gemm: {len(dead)} of {parts} processes that compile ended with {dead[0]}, so that their tiles were not compared; what they say is above"
            )
        files = [Path(f"{wrong}.{part}") for part in range(parts)]
        return {(m, number): why for file in files for m, number, why in json.loads(file.read_text())}


def run(args: argparse.Namespace) -> int:
    """Search, print and with ``--out`` keep. Raises ``ConfigError`` without a device, or for a number of rows that is not searched, ``EngineError``
    where a process that compiles dies."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("tune-gemm: torch finds no GPU here")
    if wrong := [m for m in args.rows if not 1 <= m <= MAX_ROWS]:
        raise ConfigError(f"--rows {wrong[0]}: from 1 to {MAX_ROWS}")
    shapes: Sequence[Shape] = args.shape or _SHAPES
    began = time.time()
    failed = compiled(args.rows, shapes, processes(shapes, os.cpu_count() or 1, torch.cuda.mem_get_info()[0]))
    print(
        f"compiled in {time.time() - began:.1f} s, {len(failed)} fail", *list(failed.values())[:6], sep="\n", flush=True
    )
    began = time.time()
    record: list[dict[str, Any]] = []
    for m in args.rows:
        for shape in shapes:
            record.append(searched(m, shape, shapes, failed, began + args.seconds))
            if args.out:
                Path(args.out).write_text(json.dumps(head() | {"measured": record}, indent=1) + "\n")
    print(f"timed in {time.time() - began:.1f} s")
    return 0


def head() -> dict[str, Any]:
    """What the times of this process are of."""
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "capability": ".".join(str(part) for part in torch.cuda.get_device_capability()),
        "torch": torch.__version__.partition("+")[0],
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": "tokenspeed tune-gemm --out FILE",
        "unit": "microseconds a call in a captured graph over distinct weights",
    }


def searched(
    m: int, shape: Shape, shapes: Sequence[Shape], failed: dict[tuple[int, int], str], until: float
) -> dict[str, Any]:
    """Time what compiled for one shape and ``m`` rows, the best six once more. Returns its entry of the file."""
    import torch

    from tokenspeed_plugin_kernels_triton.gemm import SmallGemm

    n, k, gated = shape
    nbytes = n * k * 2
    gemm = SmallGemm(torch.device("cuda"))
    weights = [
        torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(max(2, int(1.3e9 / nbytes)))
    ]
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")

    def time_of(cfg: GemmConfig, repeats: int) -> float:
        call = run_of(gemm, gated, cfg, x)
        return graph_time([lambda w=w: call(w) for w in weights], repeats)  # type: ignore[misc]

    library = graph_time([lambda w=w: reference(x, w, gated) for w in weights], 5)  # type: ignore[misc]
    timed = [
        (time_of(cfg, 3), cfg)
        for number, (other, cfg) in enumerate(candidates(m, shapes, gemm.tuning.limit))
        if other == shape and (m, number) not in failed and time.time() < until
    ]
    timed.sort(key=lambda entry: entry[0])
    again = sorted(((time_of(cfg, 15), cfg) for _, cfg in timed[:6]), key=lambda entry: entry[0])
    print(f"m={m} {n}x{k}: library {library:.2f} us {nbytes / library * 1e-6:.2f} TB/s, {len(timed)} timed")
    for us, cfg in again[:4]:
        print(f"   {us:8.2f} us {nbytes / us * 1e-6:.2f} TB/s {cfg!r}", flush=True)
    return {
        "rows": m,
        "n": n,
        "k": k,
        "gated": gated,
        "library_us": round(library, 2),
        "timed": len(timed),
        "best": [{"us": round(us, 2), **asdict(cfg)} for us, cfg in again[:3]],
    }

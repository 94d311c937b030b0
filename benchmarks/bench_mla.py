"""Times multi-head latent attention of the plugin ``attention-mla`` on one GPU beside FlashInfer's, sizes of DeepSeek V3, bf16, in captured graphs.

python benchmarks/bench_mla.py [--sweep] [--only decode,fp8,prefill,pack] [--heads 16,128] [--json FILE]

Each result is checked before it is timed. The floor is the time to read what must be read, or to compute what must be computed, at what one H200 was measured
to reach (4.27 TB/s, 770 TFLOP/s). ``--sweep`` times further tilings of the decode kernel at 32 rows; FlashInfer compiles its kernels at the first run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from h200_kernels import DEVICE, timed
from tokenspeed_plugin_attention_mla.expand import ExpandedPrefill
from tokenspeed_plugin_attention_mla.hopper import HOPPER_TILES
from tokenspeed_plugin_attention_mla.pack import write_latent
from tokenspeed_plugin_attention_mla.tiling import TILES, TILES_FP8, Tiling
from tokenspeed_plugin_attention_mla.work import LatentWork, processors_of, tiles_of

from tokenspeed.interfaces.attention import LatentUp

RANK, ROPE, NOPE, V_DIM = 512, 64, 128, 128
DIM = RANK + ROPE
PAGE = 64
SCALE = (NOPE + ROPE) ** -0.5
TB_S, TFLOP_S = 4.27, 770.0

#: Tried by ``--sweep``, by the queries of a row that they are for.
SWEEP: dict[int, tuple[Tiling, ...]] = {
    16: (
        Tiling(queries=16, latents=32, warps=4, stages=3, residency=2),
        Tiling(queries=16, latents=32, warps=4, stages=3, residency=1),
        Tiling(queries=16, latents=32, warps=4, stages=4, residency=1),
        Tiling(queries=16, latents=32, warps=4, stages=6, residency=1),
        Tiling(queries=16, latents=64, warps=4, stages=3, residency=1),
        Tiling(queries=16, latents=64, warps=8, stages=3, residency=1),
        Tiling(queries=16, latents=64, warps=4, stages=2, swap=True),
        Tiling(queries=16, latents=64, warps=8, stages=2, swap=True),
    ),
    128: (
        Tiling(queries=64, latents=64, warps=8, stages=2),
        Tiling(queries=64, latents=32, warps=8, stages=3),
        Tiling(queries=64, latents=32, warps=8, stages=4),
        Tiling(queries=32, latents=64, warps=8, stages=3),
        Tiling(queries=32, latents=64, warps=4, stages=2, swap=True),
        Tiling(queries=32, latents=64, warps=8, stages=2, swap=True),
    ),
}


class Table:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, us: float, nbytes: float, flops: float) -> None:
        floor = max(nbytes / TB_S, flops / TFLOP_S) * 1e-6
        row = {"case": name, "us": us, "floor_us": floor, "tb_s": nbytes / us * 1e-6, "tflop_s": flops / us * 1e-6}
        self.rows.append({key: value if key == "case" else round(float(value), 2) for key, value in row.items()})
        print(
            f"{name:<66} {us:>9.1f} us, floor {floor:>7.1f}, {row['tb_s']:>5.2f} TB/s, {row['tflop_s']:>5.0f} TFLOP/s",
            flush=True,
        )


class Rows:
    """Rows of ``context`` latents over shuffled pages; enough pools of them that none is found in L2."""

    def __init__(self, rows: int, context: int, dtype: torch.dtype = torch.bfloat16) -> None:
        each = -(-context // PAGE)
        pages = rows * each
        self.rows, self.context = rows, context
        size = pages * PAGE * DIM * dtype.itemsize
        self.pools = [
            torch.randn(pages, PAGE, 1, DIM, dtype=torch.bfloat16, device=DEVICE).to(dtype)
            for _ in range(max(2, min(24, -(-400 * 2**20 // size))))
        ]
        order = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(rows, each)
        self.table = torch.from_numpy(order).to(DEVICE)
        self.host_lengths = np.full(rows, context, dtype=np.int32)
        self.lengths = torch.from_numpy(self.host_lengths).to(DEVICE)

    def check(self, q: torch.Tensor, out: torch.Tensor, width: int, kv_scale: float) -> str:
        """Of the first and the last row, in fp32: empty, or how far off the result is."""
        worst = 0.0
        for row in {0, self.rows - 1}:
            c = self.pools[0][self.table[row].long()].reshape(-1, DIM)[: self.context].float() * kv_scale
            for w in range(width):
                seen = c[: self.context - width + w + 1]
                weights = torch.softmax(q[row * width + w].float() @ seen.t() * SCALE, dim=-1)
                expected = weights @ seen[:, :RANK]
                off = (out[row * width + w].float() - expected).abs().max() / expected.abs().max()
                worst = max(worst, float(off))
        return f" WRONG by {worst:.3f}" if not worst < 3e-2 else ""


def work_of(heads: int, rows: int, tiles: tuple[Tiling, ...]) -> LatentWork:
    return LatentWork(
        heads=heads, rank=RANK, rope=ROPE, page_size=PAGE, max_rows=rows, max_queries=8192 * heads, processors=processors_of(DEVICE), device=DEVICE,
        tiles=tiles,
    )  # fmt: skip


def decode(
    table: Table, rows: Rows, heads: int, width: int, tiles: tuple[Tiling, ...], note: str = "", kv_scale: float = 1.0
) -> None:
    q = torch.randn(rows.rows * width, heads, DIM, dtype=torch.bfloat16, device=DEVICE)
    start = torch.arange(rows.rows + 1, dtype=torch.int32, device=DEVICE) * width
    work = work_of(heads, rows.rows, tiles)
    work.prepare(rows.host_lengths, width)

    def call(pool: torch.Tensor) -> torch.Tensor:
        return work.decode(q, pool, rows.table, rows.lengths, start, width=width, scale=SCALE, kv_scale=kv_scale)

    name = f"{heads} heads, {rows.rows} rows of {rows.context}{f', width {width}' if width > 1 else ''}{note}"
    try:
        wrong = rows.check(q, call(rows.pools[0]), width, kv_scale)
        us = timed([lambda pool=pool: call(pool) for pool in rows.pools])
    except Exception as error:  # a tiling that does not fit must not end the run
        print(f"{name}: failed: {str(error)[:160]}", flush=True)
        return
    add(table, name + wrong, us, rows, heads * width)


def add(table: Table, name: str, us: float, rows: Rows, queries: int) -> None:
    tokens = rows.rows * rows.context
    table.add(name, us, tokens * DIM * rows.pools[0].itemsize, 2.0 * tokens * queries * (DIM + RANK))


def peer(table: Table, rows: Rows, heads: int, width: int) -> None:
    """FlashInfer's wrapper on the same latents, in the two tensors that it takes."""
    try:
        import flashinfer.mla as mla
    except ImportError as error:
        print(f"flashinfer is not importable: {error}", flush=True)
        return
    each = rows.table.shape[1]
    indptr = torch.arange(rows.rows + 1, dtype=torch.int32, device=DEVICE)
    pools = [(pool[:, :, 0, :RANK].contiguous(), pool[:, :, 0, RANK:].contiguous()) for pool in rows.pools]
    q = torch.randn(rows.rows * width, heads, DIM, dtype=torch.bfloat16, device=DEVICE)
    nope, rope = q[..., :RANK].contiguous(), q[..., RANK:].contiguous()
    for backend in ("fa3", "fa2"):
        try:
            wrapper = mla.BatchMLAPagedAttentionWrapper(
                torch.empty(256 * 2**20, dtype=torch.int8, device=DEVICE), backend=backend
            )
            wrapper.plan(
                indptr * width, indptr * each, rows.table.reshape(-1), rows.lengths, heads, RANK, ROPE, PAGE, width > 1, SCALE, q.dtype, torch.bfloat16,
            )  # fmt: skip
            wrong = rows.check(q, wrapper.run(nope, rope, *pools[0]), width, 1.0)
            us = timed([lambda pool=pool, wrapper=wrapper: wrapper.run(nope, rope, *pool) for pool in pools])
        except Exception as error:
            print(f"flashinfer {backend}: failed: {str(error)[:160]}", flush=True)
            continue
        name = f"    FlashInfer {backend}: {heads} heads, {rows.rows} rows of {rows.context}{f', width {width}' if width > 1 else ''}"
        add(table, name + wrong, us, rows, heads * width)


def prefill(table: Table, heads: int, tokens: int, context: int) -> None:
    rows = Rows(1, tokens + context)
    up = LatentUp(
        keys=torch.randn(heads, NOPE, RANK, dtype=torch.bfloat16, device=DEVICE) * RANK**-0.5,
        values=torch.randn(heads, V_DIM, RANK, dtype=torch.bfloat16, device=DEVICE) * RANK**-0.5,
    )
    q = torch.randn(tokens, heads, NOPE + ROPE, dtype=torch.bfloat16, device=DEVICE)
    start = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    counts = np.array([context], dtype=np.int32), np.array([tokens], dtype=np.int32)
    expanded = ExpandedPrefill(max_rows=1, max_tokens=8192, workspace_bytes=2**30, device=DEVICE)
    expanded.prepare(*counts)
    work = work_of(heads, 1, tiles_of(DEVICE, q.dtype, q.dtype, rank=RANK, rope=ROPE, page_size=PAGE))
    work.prepare_extend(*counts)
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "expanded": lambda pool: expanded.run(q, pool, rows.table, start, up, scale=SCALE),
        "absorbed": lambda pool: up.project(
            work.extend(up.absorb(q), pool, rows.table, rows.lengths, start, scale=SCALE)
        ),
    }
    first, second = (call(rows.pools[0]).float() for call in calls.values())
    off = float((first - second).abs().max() / second.abs().max())
    pairs = tokens * (context + (tokens + 1) / 2)
    flops = 2.0 * pairs * heads * (NOPE + ROPE + V_DIM)  # of the heads' own keys and values, whatever is computed
    for name, call in calls.items():
        us = timed([lambda pool=pool, call=call: call(pool) for pool in rows.pools[:2]], 3)
        wrong = f" WRONG by {off:.3f}" if not off < 5e-2 else ""
        table.add(f"prefill {name}, {heads} heads, {tokens} tokens after {context}{wrong}", us, 0.0, flops)


def pack(table: Table, tokens: int, dtype: torch.dtype) -> None:
    rows = torch.randn(tokens, 1536 + DIM, dtype=torch.bfloat16, device=DEVICE)  # a part of a fused product
    latent, rope = rows[:, 1536 : 1536 + RANK], rows[:, 1536 + RANK :]
    pools = [
        torch.zeros(-(-tokens // PAGE) * 2, PAGE, 1, DIM, dtype=torch.bfloat16, device=DEVICE).to(dtype)
        for _ in range(4)
    ]
    slots = torch.randperm(pools[0].shape[0] * PAGE, device=DEVICE)[:tokens]
    us = timed([lambda pool=pool: write_latent(latent, rope, pool, slots, "NHD", 0.5) for pool in pools])
    table.add(f"write of {tokens} latents to {str(dtype)[6:]}", us, tokens * DIM * (2 + dtype.itemsize), 0.0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="further tilings of the decode kernel at 32 rows")
    parser.add_argument("--only", default="decode,fp8,prefill,pack")
    parser.add_argument("--heads", default="16,128")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rows", default="32,1,8,64,128", help="rows of a step; the first are those of the sweep")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args(arguments)
    only, heads_list = args.only.split(","), [int(heads) for heads in args.heads.split(",")]
    counts = [int(count) for count in args.rows.split(",")]
    table = Table()
    bf16 = torch.bfloat16
    chosen = tiles_of(DEVICE, bf16, bf16, rank=RANK, rope=ROPE, page_size=PAGE)
    with torch.inference_mode():
        for count in counts if "decode" in only else []:
            rows = Rows(count, args.context)
            for heads in heads_list:
                for width in (1, 2) if count == counts[0] else (1,):
                    decode(table, rows, heads, width, chosen)
                    if args.sweep and count == counts[0] and chosen is not TILES:
                        decode(table, rows, heads, width, TILES, " portable")
                    peer(table, rows, heads, width)
                if args.sweep and count == counts[0]:
                    for tiling in (HOPPER_TILES if chosen is HOPPER_TILES else ()) + SWEEP[16 if heads <= 16 else 128]:
                        note = f" {tiling.kernel} {tiling.latents}x{tiling.queries}"
                        if tiling.kernel == "portable":
                            note += (
                                f"{' swap' if tiling.swap else ''} w{tiling.warps} s{tiling.stages} r{tiling.residency}"
                            )
                        decode(table, rows, heads, 1, (replace(tiling),), note)
            del rows
        for heads in heads_list if "fp8" in only else []:
            rows = Rows(counts[0], args.context, torch.float8_e4m3fn)
            decode(table, rows, heads, 1, TILES_FP8, ", fp8", 0.5)
        for heads in heads_list if "prefill" in only else []:
            for tokens, context in ((args.context, 0), (args.context // 4, args.context)):
                prefill(table, heads, tokens, context)
        for tokens in (32, args.context) if "pack" in only else []:
            for dtype in (torch.bfloat16, torch.float8_e4m3fn):
                pack(table, tokens, dtype)
    if args.json:
        args.json.write_text(json.dumps(table.rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Times decode attention on the present device: one layer of 32/8 heads of 128, bf16 (pages by ``--kv``); achieved TB/s against the bytes that must be read.

python plugins/attention/triton/bench/bench_decode.py [--sweep] [--kv fp8]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from tokenspeed_plugin_attention_triton import kernels
from tokenspeed_plugin_attention_triton.kernels import DecodeWork

HQ, HK, D = 32, 8, 128


def graph_time(calls, reps=7):
    for c in calls[:2]:
        c()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for c in calls:
            c()
    graph.replay()
    best = 1e9
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        best = min(best, a.elapsed_time(b) * 1e3 / len(calls))
    return best


def reference(q, k, v, table, lens):
    out = torch.empty_like(q)
    k, v = k.to(q.dtype), v.to(q.dtype)
    for r in range(q.shape[0]):
        n = lens[r]
        kk = k[table[r].long()].transpose(1, 2).reshape(-1, HK, D)[:n]
        vv = v[table[r].long()].transpose(1, 2).reshape(-1, HK, D)[:n]
        qq = q[r].view(1, HQ, 1, D)
        out[r] = torch.nn.functional.scaled_dot_product_attention(
            qq, kk.transpose(0, 1)[None], vv.transpose(0, 1)[None], enable_gqa=True
        ).view(HQ, D)
    return out


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--page", type=int, default=64)
    p.add_argument("--sweep", action="store_true")
    p.add_argument("--kv", choices=("bf16", "fp8"), default="bf16", help="element type of the pages")
    p.add_argument("--rows", help="only these row counts, as 1,64")
    a = p.parse_args()
    kv = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[a.kv]
    token_bytes = HK * D * 2 * kv.itemsize
    dev = torch.device("cuda")
    page = a.page
    cases = [  # rows, shared, own
        (1, 0, 1100), (8, 0, 1100), (32, 0, 1100), (64, 0, 1100), (128, 0, 1100), (256, 0, 1100), (1, 0, 32768), (1, 0, 131072),
        (16, 8192, 576), (64, 8192, 576), (128, 8192, 576), (64, 32768, 576),
    ]  # fmt: skip
    if a.rows:
        cases = [case for case in cases if case[0] in map(int, a.rows.split(","))]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    settings = [(64, 2, 3, 64, 2)]
    if a.sweep:
        settings = [
            (bn, mult, st, tile, sst)
            for bn, (mult, st), (tile, sst) in itertools.product(
                (64, 128), ((1, 4), (2, 2), (2, 3), (3, 2), (4, 2)), ((64, 2), (128, 2))
            )
        ]
    pool_pages = 0
    for rows, shared, own in cases:
        pool_pages = max(pool_pages, shared // page + rows * (-(-own // page) + 1))
    layers = 4
    caches = [
        (
            torch.randn(pool_pages, HK, page, D, dtype=torch.bfloat16, device=dev).to(kv),
            torch.randn(pool_pages, HK, page, D, dtype=torch.bfloat16, device=dev).to(kv),
        )
        for _ in range(layers)
    ]
    for rows, shared, own in cases:
        perm = np.random.default_rng(0).permutation(pool_pages).astype(np.int32)
        per = -(-own // page)
        table = np.zeros((rows, shared // page + per), dtype=np.int32)
        table[:, : shared // page] = perm[: shared // page]
        table[:, shared // page :] = perm[shared // page : shared // page + rows * per].reshape(rows, per)
        lens = np.full(rows, shared + own, dtype=np.int32)
        t_table, t_lens = torch.from_numpy(table).to(dev), torch.from_numpy(lens).to(dev)
        q = torch.randn(rows, HQ, D, dtype=torch.bfloat16, device=dev)
        floor = (shared + rows * own) * token_bytes
        results = []
        for mode in ["flat", "shared"] if shared else ["flat"]:
            for bn, mult, st, tile, sst in settings:
                kernels.BLOCK_KV, kernels.SHARED_TILE = bn, tile
                kernels.OWN_STAGES, kernels.SHARED_STAGES = st, sst
                work = DecodeWork(
                    max_rows=256,
                    max_width=1,
                    q_heads=HQ,
                    kv_heads=HK,
                    v_dim=D,
                    page_size=page,
                    device=dev,
                    programs=sms * mult,
                )
                iv = np.array([[0, rows, 0, shared // page]] if mode == "shared" else [], dtype=np.int32).reshape(-1, 4)
                work.prepare(lens, iv, 1)
                try:
                    out = work.run(q, *caches[0], t_table, t_lens, width=1, scale=D**-0.5, layout="HND")
                    if (rows, shared) in ((1, 0), (8, 0), (16, 8192)) and own < 40000:
                        ref = reference(q, *caches[0], t_table, lens)
                        err = (out.float() - ref.float()).abs().max().item()
                        if err > 2e-2:
                            print("WRONG", mode, bn, mult, st, tile, err)
                    calls = [
                        (lambda c=c: work.run(q, *c, t_table, t_lens, width=1, scale=D**-0.5, layout="HND"))
                        for c in caches
                    ] * 2
                    us = graph_time(calls)
                except Exception as e:
                    print("fail", bn, mult, st, tile, str(e)[:80])
                    continue
                results.append((us, mode, (bn, mult, st, tile, sst), work.has_split))
        for mode in ("flat", "shared"):
            for us, _, cfg, split in sorted(r for r in results if r[1] == mode)[:4]:
                nbytes = floor if mode == "shared" else rows * (shared + own) * token_bytes
                print(
                    f"rows {rows} shared {shared} own {own} {mode}: {us:.1f} us, {nbytes / us * 1e-6:.2f} TB/s, split {split}, {cfg}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""The kernel table of ``h200.py``: what each kernel reaches of the card's measured ceilings, on the benchmark's shapes, timed in captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tokenspeed.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, LayerKV
from tokenspeed.interfaces.batch import ForwardBatch, HostBatch
from tokenspeed.interfaces.kernel import KernelContext, KernelRequest
from tokenspeed.plugins.selection import load_target
from tokenspeed.types import CacheGroup

__all__ = ["kernel_table"]

HIDDEN, INTER, VOCAB, HQ, HK, DIM = 4096, 12288, 151936, 32, 8, 128
DEVICE = torch.device("cuda")


def timed(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Microseconds of one call, of a graph that makes all ``calls``, which should not share what they read."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return float(np.median(times[1:]))


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) * 0.02


class Table:
    """Rows as they come. The first two are the ceilings of this card, one of each unit; the others tell their share of them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._ceilings: dict[str, float] = {}

    def ceiling(self, name: str, us: float, *, nbytes: float = 0.0, flops: float = 0.0) -> None:
        """What the card does at most, measured."""
        self._add(f"{name} (ceiling)", us, nbytes, flops, ceiling=True)

    def add(self, name: str, us: float, *, nbytes: float = 0.0, flops: float = 0.0) -> None:
        """A kernel by the bytes that it must read, or by its operations."""
        self._add(name, us, nbytes, flops, ceiling=False)

    def _add(self, name: str, us: float, nbytes: float, flops: float, *, ceiling: bool) -> None:
        reached = (nbytes or flops) / us * 1e-6
        unit = "TB/s" if nbytes else "TFLOP/s"
        if ceiling:
            self._ceilings[unit] = reached
        share = reached / self._ceilings[unit]
        row = {"kernel": name, "us": round(us, 2), "reached": round(reached, 2), "unit": unit, "share": round(share, 3)}
        self.rows.append(row)
        print(f"{name:<58} {us:>9.1f} us {reached:>8.2f} {unit:<7} {share:>5.0%}", flush=True)


def backend_of(assembly: Any, phase: str, select: Any) -> AttentionBackend:
    spec = assembly.attention[phase]
    group = CacheGroup(kind="full", layers=(0,), kv_heads=HK, head_dim=DIM, v_head_dim=DIM)
    made: AttentionBackend = load_target(spec.target)(
        AttentionContext(
            q_heads=HQ, group=group, group_index=0, layout=assembly.kv_layout, page_size=assembly.page_size,
            dtype=torch.bfloat16, kv_dtype=torch.bfloat16, device=DEVICE, max_rows=256, max_tokens=8192,
            max_model_len=135168, select_kernel=select, options=assembly.options_of(f"attention.{phase}"),
        )
    )  # fmt: skip
    return made


def attention_batch(
    contexts: list[int], queries: list[int], table: np.ndarray, intervals: list[list[int]], extends: int
) -> ForwardBatch:
    query, context = np.array(queries, dtype=np.int32), np.array(contexts, dtype=np.int32)
    start = np.concatenate([[0], np.cumsum(query)]).astype(np.int32)
    seq = (context + query).astype(np.int32)
    put = lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(DEVICE)  # noqa: E731
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    return ForwardBatch(
        num_rows=len(query), num_extend_rows=extends, num_tokens=int(start[-1]), num_extend_tokens=int(start[extends]),
        decode_width=1, max_seq_len=int(seq.max()), input_ids=none, positions=none, query_start=put(start), seq_lens=put(seq),
        page_tables=[put(table)], slot_mapping=[none], output_index=None,
        host=HostBatch(
            slots=np.arange(len(query), dtype=np.int32), context_lens=context, query_lens=query, seq_lens=seq,
            prefix_intervals=np.array(intervals, dtype=np.int32).reshape(-1, 4),
        ),
    )  # fmt: skip


def gemms(table: Table, select: Any) -> None:
    for rows in (1, 8, 32):
        for name, n, k, mode in (
            ("qkv", HQ * DIM + 2 * HK * DIM, HIDDEN, "linear"), ("o", HIDDEN, HQ * DIM, "linear"),
            ("gate-up and silu", 2 * INTER, HIDDEN, "linear_silu_mul"), ("down", HIDDEN, INTER, "linear"), ("head", VOCAB, HIDDEN, "linear"),
        ):  # fmt: skip
            kernel = select(KernelRequest(family="gemm", mode=mode, dtype="bf16", shape={"n": n, "k": k}))
            weights, x = [draw(n, k) for _ in range(2 if n > 100000 else 36)], draw(rows, k)
            us = timed([lambda w=w, x=x, kernel=kernel: kernel(x, w, None) for w in weights])
            table.add(f"gemm {name} {n}x{k}, {rows} rows", us, nbytes=n * k * 2)
    x, weight = draw(8192, HIDDEN), draw(2 * INTER, HIDDEN)
    us = timed([lambda: torch.nn.functional.linear(x, weight)] * 3)
    table.add("gemm gate-up, 8192 rows (vendor's library)", us, flops=2 * 8192 * HIDDEN * 2 * INTER)


def attentions(table: Table, assembly: Any, select: Any) -> None:
    layer = AttentionLayer(index=0, scale=DIM**-0.5)
    pages = 4864
    shape = (pages, HK, 64, DIM) if assembly.kv_layout.value == "HND" else (pages, 64, HK, DIM)
    pools = [LayerKV(k=draw(*shape), v=draw(*shape)) for _ in range(4)]
    numbers = np.random.default_rng(0).permutation(pages).astype(np.int32)
    decode, extend = backend_of(assembly, "decode", select), backend_of(assembly, "extend", select)
    cases = [(rows, 0, 1100) for rows in (1, 8, 32, 64, 128, 256)] + [(1, 0, 32768), (1, 0, 131072), (64, 8192, 576)]
    for rows, shared, own in cases:
        each, common = -(-own // 64), shared // 64
        pages_of = np.concatenate(
            [np.tile(numbers[:common], (rows, 1)), numbers[common : common + rows * each].reshape(rows, each)], axis=1
        )
        batch = attention_batch(
            [shared + own - 1] * rows, [1] * rows, pages_of, [[0, rows, 0, common]] if shared else [], 0
        )
        decode.init_forward_metadata(batch)
        q = draw(rows, HQ, DIM)
        us = timed([lambda kv=kv, q=q, batch=batch: decode.forward_decode(q, kv, layer, batch) for kv in pools])
        name = f"decode attention, {rows} rows of {own}" + (f" and {shared} shared" if shared else "")
        table.add(name, us, nbytes=(shared + rows * own) * HK * DIM * 4)
    for query, context in ((1024, 0), (8192, 0), (8192, 24576)):
        count = (query + context) // 64
        batch = attention_batch([context], [query], numbers[None, :count], [], 1)
        extend.init_forward_metadata(batch)
        q = draw(query, HQ, DIM)
        extend.forward_extend(q, pools[0], layer, batch)
        us = timed([lambda kv=kv, q=q, batch=batch: extend.forward_extend(q, kv, layer, batch) for kv in pools])
        table.add(
            f"prefill attention, {query} tokens after {context}", us, flops=4 * HQ * DIM * query * (context + query / 2)
        )


def kernel_table(assembly: Any) -> list[dict[str, Any]]:
    """Time the kernels that ``assembly`` chose; prints as it goes."""
    torch.cuda.empty_cache()
    # While much memory that was just freed lies unallocated, everything on the card is 12 % slower (the driver clears it): take it again.
    taken = torch.empty(max(0, torch.cuda.mem_get_info()[0] - 28 * 2**30), dtype=torch.uint8, device=DEVICE)
    shared: dict[str, Any] = {}
    registry = assembly.kernel_registry(
        lambda plugin: KernelContext(device=DEVICE, threads=1, shared=shared, options=assembly.options.get(plugin, {}))
    )
    table = Table()
    with torch.inference_mode():
        source = torch.empty(2**29, dtype=torch.bfloat16, device=DEVICE)
        target = torch.empty_like(source)
        # An elementwise kernel: inside a graph a plain copy goes to the copy engines, which are slower than the processors.
        table.ceiling("read and write 1 GiB", timed([lambda: torch.neg(source, out=target)] * 3), nbytes=2 * 2**30)
        square = [draw(8192, 8192) for _ in range(2)]
        table.ceiling("matrix product 8192^3", timed([lambda: square[0] @ square[1]] * 3), flops=2 * 8192**3)
        gemms(table, registry.select)
        attentions(table, assembly, registry.select)
    del taken
    return table.rows

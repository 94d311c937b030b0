"""The backend ``sdpa``: prepares a step once, then hands rows to the best kernels there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tokenspeed.errors import PluginError
from tokenspeed.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, LayerKV
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.interfaces.kernel import KernelRequest

__all__ = ["SdpaAttention"]

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

Kernel = Callable[..., torch.Tensor]


class SdpaAttention(AttentionBackend):
    """Kernels are chosen here, once for each set of features that layers need; a decode kernel with ``shared_prefix`` gets the plan's intervals."""

    def __init__(self, ctx: AttentionContext) -> None:
        super().__init__(ctx)
        self._kernels: dict[tuple[str, frozenset[str]], tuple[Kernel, bool]] = {}
        self._layout = ctx.layout.value
        self._by_layer: dict[int, tuple[Kernel, Kernel, bool]] = {}
        # What every layer needs; what more some need is asked for when they are bound.
        self._choose("extend", frozenset())
        self._choose("decode", frozenset())

    def bind_layers(self, layers: Sequence[AttentionLayer]) -> None:
        """Choose the kernels now: what cannot run is to fail at start, not in a step."""
        for layer in layers:
            self._for_layer(layer)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        extends = batch.num_extend_rows
        table = batch.page_tables[self.ctx.group_index]
        self._extend_rows = (table[:extends], batch.seq_lens[:extends], batch.query_start[: extends + 1])
        self._decode_rows = (
            table[extends : batch.num_rows],
            batch.seq_lens[extends : batch.num_rows],
            batch.decode_width,
        )
        intervals = batch.host.prefix_intervals
        self._intervals: np.ndarray | None = None
        if (
            len(intervals) and self.ctx.group.keeps_all
        ):  # rows share pages of full groups; a window's may differ row by row
            # The plan counts rows of the step, kernels count decode rows.
            self._intervals = np.ascontiguousarray(intervals - np.array((extends, extends, 0, 0), dtype=np.int32))

    def forward_extend(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:  # noqa: ARG002
        kernel = (self._by_layer.get(layer.index) or self._for_layer(layer))[0]
        table, seq_lens, query_start = self._extend_rows
        return kernel(
            q,
            kv.k,
            kv.v,
            table,
            seq_lens,
            query_start,
            layer.scale,
            self._layout,
            layer.window,
            layer.softcap,
            layer.sinks,
        )

    def forward_decode(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:  # noqa: ARG002
        _, kernel, shares = self._by_layer.get(layer.index) or self._for_layer(layer)
        table, seq_lens, width = self._decode_rows
        intervals = self._intervals if shares else None
        return kernel(
            q,
            kv.k,
            kv.v,
            table,
            seq_lens,
            width,
            layer.scale,
            self._layout,
            layer.window,
            layer.softcap,
            layer.sinks,
            intervals,
        )

    def _for_layer(self, layer: AttentionLayer) -> tuple[Kernel, Kernel, bool]:
        """The layer's kernels; asked for once."""
        wanted = {"window": layer.window > 0, "softcap": layer.softcap > 0, "sinks": layer.sinks is not None}
        features = frozenset(name for name, needed in wanted.items() if needed)
        extend, _ = self._choose("extend", features)
        decode, shares = self._choose("decode", features)
        self._by_layer[layer.index] = (extend, decode, shares)
        return self._by_layer[layer.index]

    def _choose(self, mode: str, features: frozenset[str]) -> tuple[Kernel, bool]:
        """The kernel for a mode, and whether it reads shared prefixes once."""
        key = (mode, features)
        if key not in self._kernels:
            self._kernels[key] = self._select(mode, features)
        return self._kernels[key]

    def _select(self, mode: str, features: frozenset[str]) -> tuple[Kernel, bool]:
        ctx = self.ctx
        if ctx.kv_dtype != ctx.dtype:
            features |= {f"kv_{_SHORT.get(ctx.kv_dtype, str(ctx.kv_dtype))}"}

        def ask(wanted: frozenset[str]) -> Kernel:
            shape: dict[str, Any] = {
                "head_dim": ctx.group.head_dim,
                "v_head_dim": ctx.group.v_head_dim,
                "q_heads": ctx.q_heads,
                "kv_heads": ctx.group.kv_heads,
                "page_size": ctx.page_size,
            }
            dtype = _SHORT.get(ctx.dtype, str(ctx.dtype))
            request = KernelRequest(
                family="attention", mode=mode, dtype=dtype, layout=self._layout, features=wanted, shape=shape
            )
            return ctx.select_kernel(request)

        plain = ask(features)
        if mode == "decode":
            try:
                # The best kernel that shares, only if it is the best kernel: a slower one must not win because it can share.
                return plain, ask(features | {"shared_prefix"}) is plain
            except PluginError:
                pass
        return plain, False

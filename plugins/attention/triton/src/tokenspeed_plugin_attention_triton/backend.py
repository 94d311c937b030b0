"""The backend: makes the step's plan once, launches per layer."""

from __future__ import annotations

import numpy as np
import torch

from tokenspeed.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, LayerKV
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed_plugin_attention_triton.kernels import DecodeWork, Staged, run_extend

__all__ = ["TritonBackend"]


class TritonBackend(AttentionBackend):
    """Split-KV decode with shared prefixes and block-wise extend over paged KV."""

    def __init__(self, ctx: AttentionContext) -> None:
        super().__init__(ctx)
        group = ctx.group
        on_gpu = ctx.device.type == "cuda"
        # Two programs a multiprocessor keep enough loads in flight; under the interpreter a few suffice.
        processors = torch.cuda.get_device_properties(ctx.device).multi_processor_count if on_gpu else 4
        self._work = DecodeWork(
            max_rows=ctx.max_rows,
            max_width=ctx.max_width,
            q_heads=ctx.q_heads,
            kv_heads=group.kv_heads,
            v_dim=group.v_head_dim,
            page_size=ctx.page_size,
            device=ctx.device,
            programs=2 * processors,
        )
        self._block_rows = 64
        self._blocks = Staged(ctx.max_tokens // self._block_rows + ctx.max_rows + 16, 2, device=ctx.device)
        self._block_count = 0

    @property
    def graph_variants(self) -> tuple[int, ...]:
        """0: every row in one piece; 1: pieces and their merge; 3: the shared-prefix pass too."""
        return (0, 1, 3)

    @property
    def graph_variant(self) -> int:
        """What the prepared step needs."""
        return 3 if self._work.has_shared else int(self._work.has_split)

    @property
    def captures_extend(self) -> bool:
        """Its programs read on the device which rows they work for."""
        return True

    def init_capture_metadata(self, batch: ForwardBatch, variant: int) -> None:
        """Plan rows of one token, then launch as ``variant`` does."""
        self.init_forward_metadata(batch)
        self._work.has_split, self._work.has_shared = bool(variant & 1), bool(variant & 2)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan the decode rows and list the query blocks of the extend rows."""
        host, extends = batch.host, batch.num_extend_rows
        if extends:
            counts = -(-host.query_lens[:extends] // self._block_rows)
            rows = np.repeat(np.arange(extends, dtype=np.int32), counts)
            first = (np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)) * self._block_rows
            # A captured step launches as many programs as its tokens can need; those of row -1 have nothing to do.
            self._block_count = batch.num_extend_tokens // self._block_rows + extends if batch.captured else rows.size
            # The blocks with the most to read begin first, so that the short ones fill the gaps at the end.
            order = np.argsort(-(host.context_lens[rows] + first), kind="stable")
            blocks = np.full((self._block_count, 2), -1, dtype=np.int32)
            blocks[: rows.size, 0], blocks[: rows.size, 1] = rows[order], first[order]
            self._blocks.send(blocks)
        if batch.num_rows > extends:
            # Rows share pages of full groups; those of a window may differ row by row, and one row may have given back what another reads.
            intervals = host.prefix_intervals if self.ctx.group.keeps_all else host.prefix_intervals[:0]
            if extends and intervals.size:
                intervals = intervals - np.array([extends, extends, 0, 0], dtype=intervals.dtype)
            self._work.prepare(host.seq_lens[extends:], intervals.reshape(-1, 4), batch.decode_width)

    def forward_extend(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """See ``AttentionBackend``."""
        rows = batch.num_extend_rows
        return run_extend(
            q,
            kv.k,
            kv.v,
            batch.page_tables[self.ctx.group_index][:rows],
            batch.seq_lens,
            batch.query_start,
            self._blocks.tensor[: self._block_count],
            kv_heads=self.ctx.group.kv_heads,
            page_size=self.ctx.page_size,
            scale=layer.scale,
            layout=self.ctx.layout.value,
            block_rows=self._block_rows,
            window=layer.window,
            softcap=layer.softcap,
            sinks=layer.sinks,
        )

    def forward_decode(self, q: torch.Tensor, kv: LayerKV, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """See ``AttentionBackend``."""
        first = batch.num_extend_rows
        return self._work.run(
            q,
            kv.k,
            kv.v,
            batch.page_tables[self.ctx.group_index][first:],
            batch.seq_lens[first:],
            width=batch.decode_width,
            scale=layer.scale,
            layout=self.ctx.layout.value,
            window=layer.window,
            softcap=layer.softcap,
            sinks=layer.sinks,
        )

"""Turns a plan's arrays into the tensors of a ``ForwardBatch``: array operations on the host, then one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.interfaces.batch import ForwardBatch, HostBatch
from tokenspeed.runtime.page_tables import PageTables
from tokenspeed.runtime.plan import SAMPLES, PlanView
from tokenspeed.runtime.transfer import upload

__all__ = ["BatchBuilder"]


class BatchBuilder:
    """Builds each step's batch.

    Args:
        page_sizes: tokens of a page, per cache group; 0 for a recurrent one.
        last_tokens: (slots) int64 on the device, the token each slot sampled last; read where the plan does not know an input id yet.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_tokens: int,
        page_sizes: Sequence[int],
        tables: PageTables,
        last_tokens: torch.Tensor,
        device: torch.device,
    ) -> None:
        self._tables = tables
        self._page_sizes = tuple(page_sizes)
        self._last_tokens = last_tokens
        self._device = device
        self._arange = np.arange(max(max_tokens, max_rows) + 1, dtype=np.int64)

    def build(self, plan: PlanView) -> ForwardBatch:
        """The batch of ``plan``, whose deltas the page tables already hold. ``output_index`` names the last token of each row that samples."""
        rows, tokens, extends = plan.num_rows, plan.num_tokens, plan.num_extend_rows
        slots, context_lens, query_lens = plan.slots, plan.context_lens, plan.query_lens
        seq_lens = context_lens + query_lens
        start = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(query_lens, out=start[1:])
        extend_tokens = int(start[extends])
        decodes = rows - extends

        if tokens == rows:  # one token a row: the row of a token is its own number
            token_slots: npt.NDArray[Any] = slots
            positions = context_lens.astype(np.int64)
        else:
            row_of_token = np.repeat(self._arange[:rows], query_lens)
            token_slots = slots[row_of_token]
            # context + offset in the row, where the offset is the token's number less the row's first
            positions = self._arange[:tokens] + (context_lens - start[:rows])[row_of_token]

        mappings = []
        for table, page_size in zip(self._tables.host, self._page_sizes, strict=True):
            if page_size == 0:
                mappings.append(table[token_slots, 0].astype(np.int64))
                continue
            page, offset = np.divmod(positions, page_size)
            mappings.append(table[token_slots, page].astype(np.int64) * page_size + offset)
        unknown = np.flatnonzero(plan.input_ids < 0)
        last = start[1:].astype(np.int64) - 1
        sampling = np.flatnonzero(plan.flags & SAMPLES)
        wide = [plan.input_ids.astype(np.int64), positions, slots.astype(np.int64), last[sampling]]
        wide += [unknown, token_slots[unknown].astype(np.int64), *mappings]
        ids, where, slot_index, output_index, at, source, *slot_mapping, query_start, lens = upload(
            [*wide, start, seq_lens], self._device
        )
        if len(unknown):
            ids.index_copy_(0, at, self._last_tokens.index_select(0, source))
        max_seq_len = int(seq_lens.max())
        return ForwardBatch(
            num_rows=rows,
            num_extend_rows=extends,
            num_tokens=tokens,
            num_extend_tokens=extend_tokens,
            decode_width=(tokens - extend_tokens) // decodes if decodes else 1,
            max_seq_len=max_seq_len,
            input_ids=ids,
            positions=where,
            query_start=query_start,
            seq_lens=lens,
            page_tables=self._page_tables(slot_index, max_seq_len),
            slot_mapping=slot_mapping,
            output_index=output_index,
            host=HostBatch(
                slots=slots,
                context_lens=context_lens,
                query_lens=query_lens,
                seq_lens=seq_lens,
                prefix_intervals=plan.prefix_intervals,
            ),
        )

    def _page_tables(self, slots: torch.Tensor, max_seq_len: int) -> list[torch.Tensor]:
        """Tables in row order. On the host they are cut to the pages in use; on a device their width never changes, so kernels see one row stride."""
        tables = []
        for table, page_size in zip(self._tables.device, self._page_sizes, strict=True):
            cut = page_size > 0 and self._device.type == "cpu"
            pages = -(-max_seq_len // page_size) if cut else table.shape[1]
            tables.append(table[:, :pages].index_select(0, slots))
        return tables

"""Turns a plan's arrays into the tensors of a ``ForwardBatch``, in buffers that live as long as the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.interfaces.batch import ForwardBatch, HostBatch
from tokenspeed.runtime.page_tables import PageTables
from tokenspeed.runtime.plan import PlanView

__all__ = ["BatchBuilder"]


class _Buffer:
    """A host array and its device tensor; on a host device they are the same memory."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        on_host = device.type == "cpu"
        staging = torch.zeros(size, dtype=dtype, pin_memory=not on_host)
        self.host: npt.NDArray[Any] = staging.numpy()
        self._staging = staging
        self._device = staging if on_host else torch.zeros(size, dtype=dtype, device=device)

    def commit(self, count: int) -> torch.Tensor:
        """The first ``count`` entries on the device."""
        view = self._device[:count]
        if self._device is not self._staging:
            view.copy_(self._staging[:count], non_blocking=True)
        return view


class BatchBuilder:
    """Builds each step's batch with array operations only.

    Args:
        page_sizes: tokens of a page, per cache group.
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
        self._input_ids = _Buffer(max_tokens, torch.int64, device)
        self._positions = _Buffer(max_tokens, torch.int64, device)
        self._query_start = _Buffer(max_rows + 1, torch.int32, device)
        self._seq_lens = _Buffer(max_rows, torch.int32, device)
        self._slots = _Buffer(max_rows, torch.int64, device)
        self._slot_mapping = [_Buffer(max_tokens, torch.int64, device) for _ in page_sizes]
        self._rows = [
            torch.zeros((max_rows, table.shape[1]), dtype=torch.int32, device=device) for table in tables.device
        ]
        self._arange = np.arange(max(max_tokens, max_rows) + 1, dtype=np.int64)

    def build(self, plan: PlanView) -> ForwardBatch:
        """The batch of ``plan``, whose deltas the page tables already hold. Its tensors are valid until the next call."""
        rows, tokens, extends = plan.num_rows, plan.num_tokens, plan.num_extend_rows
        slots, context_lens, query_lens = plan.slots, plan.context_lens, plan.query_lens
        seq_lens = context_lens + query_lens
        self._query_start.host[1 : rows + 1] = np.cumsum(query_lens)
        start = self._query_start.host[: rows + 1]
        extend_tokens = int(start[extends])
        decodes = rows - extends

        if tokens == rows:  # one token a row: the row of a token is its own number
            token_slots: npt.NDArray[Any] = slots
            self._positions.host[:tokens] = context_lens
        else:
            row_of_token = np.repeat(self._arange[:rows], query_lens)
            token_slots = slots[row_of_token]
            # context + offset in the row, where the offset is the token's number less the row's first
            self._positions.host[:tokens] = self._arange[:tokens] + (context_lens - start[:rows])[row_of_token]
        positions = self._positions.host[:tokens]

        self._seq_lens.host[:rows] = seq_lens
        self._slots.host[:rows] = slots
        self._input_ids.host[:tokens] = plan.input_ids
        for table, page_size, mapping in zip(self._tables.host, self._page_sizes, self._slot_mapping, strict=True):
            page, offset = np.divmod(positions, page_size)
            mapping.host[:tokens] = table[token_slots, page].astype(np.int64) * page_size + offset

        max_seq_len = int(seq_lens.max())
        return ForwardBatch(
            num_rows=rows,
            num_extend_rows=extends,
            num_tokens=tokens,
            num_extend_tokens=extend_tokens,
            decode_width=(tokens - extend_tokens) // decodes if decodes else 1,
            max_seq_len=max_seq_len,
            input_ids=self._resolve(plan.input_ids, token_slots, tokens),
            positions=self._positions.commit(tokens),
            query_start=self._query_start.commit(rows + 1),
            seq_lens=self._seq_lens.commit(rows),
            page_tables=self._page_tables(rows, max_seq_len),
            slot_mapping=[mapping.commit(tokens) for mapping in self._slot_mapping],
            output_index=None,
            host=HostBatch(
                slots=slots,
                context_lens=context_lens,
                query_lens=query_lens,
                seq_lens=seq_lens,
                prefix_intervals=plan.prefix_intervals,
            ),
        )

    def _resolve(self, known: npt.NDArray[np.int32], token_slots: npt.NDArray[Any], tokens: int) -> torch.Tensor:
        """Input ids on the device: those the host does not know (-1) come from the last token of their slot."""
        ids = self._input_ids.commit(tokens)
        unknown = np.flatnonzero(known < 0)
        if len(unknown):
            where = torch.from_numpy(unknown).to(self._device)
            source = torch.from_numpy(token_slots[unknown].astype(np.int64)).to(self._device)
            ids.index_copy_(0, where, self._last_tokens.index_select(0, source))
        return ids

    def _page_tables(self, rows: int, max_seq_len: int) -> list[torch.Tensor]:
        """Tables in row order, cut to the pages that the longest row uses: (rows, pages) views of persistent buffers."""
        slots = self._slots.commit(rows)
        tables = []
        for table, out, page_size in zip(self._tables.device, self._rows, self._page_sizes, strict=True):
            pages = -(-max_seq_len // page_size)
            view = out[:rows, :pages]
            view.copy_(table[:, :pages].index_select(0, slots))
            tables.append(view)
        return tables

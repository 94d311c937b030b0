"""The batch that one step of the model works on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["ForwardBatch", "HostBatch"]


@dataclass(kw_only=True)
class HostBatch:
    """The step's shape as host arrays, for backends that plan on the host. All int32, rows in the order of the plan.

    Attributes:
        slots: (rows) persistent slot of each row.
        context_lens: (rows) tokens in the cache before this step.
        query_lens: (rows) tokens computed in this step.
        seq_lens: (rows) ``context_lens + query_lens``.
        prefix_intervals: (n, 4) ``row_begin, row_end, first_page_index, pages``: decode rows that share the same pages of the full groups; nested,
            outer first. They say nothing of windows: there one row may have given back what another still reads.
    """

    slots: np.ndarray
    context_lens: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    prefix_intervals: np.ndarray


@dataclass(kw_only=True)
class ForwardBatch:
    """Device tensors of one step, views into the executor's persistent buffers. Extend rows come first, then decode rows.

    Attributes:
        num_rows: rows in the step.
        num_extend_rows: how many of them are prefill chunks.
        num_tokens: query tokens of all rows.
        num_extend_tokens: query tokens of the extend rows.
        decode_width: query tokens of every decode row (1 without speculation).
        max_seq_len: largest ``seq_lens`` of the step (an upper bound under graphs).
        input_ids: (tokens) int64.
        positions: (tokens) int64.
        query_start: (rows + 1) int32, first token of each row.
        seq_lens: (rows) int32, cached plus new tokens.
        page_tables: per cache group (rows, max_pages) int32; entries past a row's length are not read.
            Of a window group those behind a row's window are not read either; a recurrent group's is (rows, 1), the row's state.
        slot_mapping: per cache group (tokens) int64, ``page * page_size + offset`` to write each token's KV to; -1 writes nothing. Of a recurrent
            group the state of the token's row.
        output_index: (sampling rows) int64, index of the token whose hidden state yields logits; ``None`` when every token does.
        captured: the step is, or will be, replayed as a graph: the decode backend computes the extend rows too. The host's ``query_lens`` leaves out
            tokens that only fill it up.
        adapters: (rows) int32 adapter index, 0 is none; ``None`` when no adapter is loaded.
        host: the same shapes on the host.
    """

    num_rows: int
    num_extend_rows: int
    num_tokens: int
    num_extend_tokens: int
    decode_width: int
    max_seq_len: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    page_tables: list[torch.Tensor]
    slot_mapping: list[torch.Tensor]
    output_index: torch.Tensor | None
    host: HostBatch
    adapters: torch.Tensor | None = None
    inputs_embeds: torch.Tensor | None = None
    captured: bool = False
    metadata: dict[str, object] = field(default_factory=dict)

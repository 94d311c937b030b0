"""Captured decode steps: everything from the input ids to the chosen tokens replayed as one graph per row count.

A step whose rows are all decodes of one token is filled up with empty rows to the next captured row count. Only three numbers a row are sent to the device
(its input id or -1, its position, its slot); the graph looks up the id that the device alone knows, the row's pages and where its keys and values go.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from tokenspeed.interfaces.attention import AttentionBackend
from tokenspeed.interfaces.batch import ForwardBatch, HostBatch
from tokenspeed.interfaces.model import CausalLM
from tokenspeed.runtime.page_tables import PageTables
from tokenspeed.runtime.plan import PlanView
from tokenspeed.runtime.sampler import guard
from tokenspeed.runtime.transfer import upload_into

__all__ = ["DecodeGraphs", "GraphOutput", "capture_sizes"]

_log = logging.getLogger(__name__)

Capture = Callable[[Callable[[], None]], Callable[[], None]]


def capture_sizes(max_rows: int, asked: Iterable[int] = ()) -> tuple[int, ...]:
    """Row counts to capture, ascending: those asked for that a step can have; otherwise powers of two to 8, then steps of 8 to 64, 16 to 256 and 32."""
    chosen = {size for size in asked if 0 < size <= max_rows}
    if chosen:
        return tuple(sorted(chosen))
    sizes, size = [1, 2, 4], 8
    while size < max_rows:
        sizes.append(size)
        size += 8 if size < 64 else 16 if size < 256 else 32
    return tuple(sorted({s for s in sizes if s < max_rows} | {max_rows}))


@dataclass(frozen=True, kw_only=True)
class GraphOutput:
    """``tokens`` (rows) int64: the largest logit of each row, -1 where they are not numbers; ``logits`` (rows, vocabulary). Valid until the next replay."""

    tokens: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Decode graphs of one rank, captured by ``capture`` and replayed by ``replay``.

    Args:
        backends: decode backends of the model's cache groups.
        argmax: kernel ``sampling.argmax``.
        last_tokens: (slots + 1) int64 on the device; each replay stores its rows' tokens there.
        sizes: row counts, ascending.
        vocab_size, dtype: shape and element type of the logits.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        backends: Iterable[AttentionBackend],
        argmax: Callable[[torch.Tensor], torch.Tensor],
        tables: PageTables,
        page_sizes: Sequence[int],
        last_tokens: torch.Tensor,
        sizes: Sequence[int],
        vocab_size: int,
        dtype: torch.dtype,
        max_seq_len: int,
    ) -> None:
        self._model = model
        self._backends = tuple(dict.fromkeys(backends))
        self._argmax = argmax
        self._tables = tables
        self._page_sizes = tuple(page_sizes)
        self._last_tokens = last_tokens
        self._sizes = tuple(sizes)
        self._max_seq_len = max_seq_len
        device, most = last_tokens.device, self._sizes[-1]
        self._inputs = torch.zeros(3 * most, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._logits = torch.zeros((most, vocab_size), dtype=dtype, device=device)
        self._query_start = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._minus_one = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._replays: dict[tuple[int, tuple[int, ...]], Callable[[], None]] = {}

    @property
    def planned(self) -> int:
        """Graphs that ``capture`` makes."""
        return len(self._sizes) * prod(len(backend.graph_variants) for backend in self._backends)

    @property
    def count(self) -> int:
        """Captured graphs."""
        return len(self._replays)

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Capture every size in every variant of the backends, the largest first so that the smaller ones fit into its scratch memory."""
        variants = list(itertools.product(*(backend.graph_variants for backend in self._backends)))
        for size in reversed(self._sizes):
            padding = np.zeros((3, size), dtype=np.int32)
            padding[2] = self._tables.spare
            upload_into(self._inputs, padding.reshape(-1))
            for variant in variants:
                batch = self._batch(size, self._host(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32), size))
                for backend, number in zip(self._backends, variant, strict=True):
                    backend.init_capture_metadata(batch, number)
                self._replays[size, variant] = capture(lambda size=size, batch=batch: self._step(size, batch))  # type: ignore[misc]

    def serves(self, plan: PlanView) -> bool:
        """Whether a captured graph can run ``plan``: decodes of one token, not more rows than the largest graph has."""
        return plan.num_extend_rows == 0 and plan.num_tokens == plan.num_rows <= self._sizes[-1] and bool(self._replays)

    def replay(self, plan: PlanView) -> GraphOutput:
        """Queue ``plan``, which ``serves`` accepts and whose deltas the page tables hold."""
        rows = plan.num_rows
        size = self._sizes[bisect_left(self._sizes, rows)]
        packed = np.zeros((3, size), dtype=np.int32)
        packed[0, :rows], packed[1, :rows], packed[2, :rows] = plan.input_ids, plan.context_lens, plan.slots
        packed[2, rows:] = self._tables.spare
        upload_into(self._inputs, packed.reshape(-1))
        host = self._host(plan.slots, plan.context_lens, size, plan.prefix_intervals)
        batch = self._batch(size, host)
        for backend in self._backends:
            backend.init_replay_metadata(batch)
        self._replays[size, tuple(backend.graph_variant for backend in self._backends)]()
        return GraphOutput(tokens=self._tokens[:rows], logits=self._logits[:rows])

    def _host(
        self,
        slots: np.ndarray,
        context_lens: np.ndarray,
        size: int,
        prefix_intervals: np.ndarray | None = None,
    ) -> HostBatch:
        """Host arrays of ``size`` rows: the given ones, then rows of the spare slot with one token."""
        rows = len(slots)
        padded = np.full((3, size), [[self._tables.spare], [0], [1]], dtype=np.int32)
        padded[0, :rows] = slots
        padded[1, :rows] = context_lens
        return HostBatch(
            slots=padded[0],
            context_lens=padded[1],
            query_lens=padded[2],
            seq_lens=padded[1] + 1,
            prefix_intervals=np.zeros((0, 4), dtype=np.int32) if prefix_intervals is None else prefix_intervals,
        )

    def _batch(self, size: int, host: HostBatch) -> ForwardBatch:
        """A decode batch without its device tensors of this step: only the graph makes those."""
        nothing = self._query_start[:0]
        return ForwardBatch(
            num_rows=size,
            num_extend_rows=0,
            num_tokens=size,
            num_extend_tokens=0,
            decode_width=1,
            max_seq_len=self._max_seq_len,
            input_ids=nothing,
            positions=nothing,
            query_start=self._query_start[: size + 1],
            seq_lens=nothing,
            page_tables=[],
            slot_mapping=[],
            output_index=None,
            host=host,
        )

    def _step(self, size: int, batch: ForwardBatch) -> None:
        """What a graph of ``size`` rows does."""
        known, where, slots = self._inputs[: 3 * size].view(3, size).to(torch.int64)
        batch.input_ids = torch.where(known < 0, self._last_tokens.index_select(0, slots), known)
        batch.positions = where
        batch.seq_lens = self._inputs[size : 2 * size] + 1
        batch.page_tables = [table.index_select(0, slots) for table in self._tables.device]
        batch.slot_mapping = []
        for table, page_size in zip(batch.page_tables, self._page_sizes, strict=True):
            if page_size == 0:  # a state; rows that only fill up have one of their own
                batch.slot_mapping.append(table[:, 0].to(torch.int64))
                continue
            page = table.gather(1, (where // page_size).unsqueeze(1)).squeeze(1)
            place = page.to(torch.int64) * page_size + where % page_size
            batch.slot_mapping.append(torch.where(slots == self._tables.spare, self._minus_one, place))
        logits = self._model.logits(self._model(batch))
        tokens, _ = guard(self._argmax(logits), logits)
        self._logits[:size].copy_(logits)
        self._tokens[:size].copy_(tokens)
        # A bad row's -1 must not become an input id of a plan that is already made.
        self._last_tokens.index_copy_(0, slots, tokens.clamp_min(0))

"""A small paged cache and hand-made batches: what a scheduler and an executor do, in the plainest way, with pages in random order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from tokenspeed.interfaces.attention import LayerKV
from tokenspeed.interfaces.batch import ForwardBatch, HostBatch
from tokenspeed.types import CacheGroup, KVLayout

__all__ = ["PagedCache", "Session"]


@dataclass
class Session:
    """One sequence: its pages, in order, and how many tokens they hold."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class PagedCache:
    """Pages for the one cache group of a model; stands where ``bind_kv`` expects a pool.

    Pages are handed out in a seeded random order and start filled with NaN, so that reading what was never written shows.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        page_size: int = 4,
        num_pages: int = 64,
        layout: KVLayout = KVLayout.NHD,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        seed: int = 0,
        table_width: int = 0,
    ) -> None:
        self.groups, self.layout, self.page_size = tuple(groups), layout, page_size
        self.device = device or torch.device("cpu")
        self.table_width = table_width
        (group,) = self.groups
        empty = partial(torch.full, fill_value=float("nan"), dtype=dtype, device=self.device)
        self._layers: dict[int, LayerKV] = {}
        for index in group.layers:
            k = empty(self._shape(num_pages, group.head_dim))
            latent = group.kind == "mla"
            v = k[..., : group.v_head_dim] if latent else empty(self._shape(num_pages, group.v_head_dim))
            self._layers[index] = LayerKV(k=k, v=v)
        self._free = np.random.default_rng(seed).permutation(num_pages).tolist()
        self.waited: list[int] = []
        self.written: list[int] = []

    def _shape(self, pages: int, dim: int) -> tuple[int, ...]:
        heads = self.groups[0].kv_heads
        return (
            (pages, self.page_size, heads, dim) if self.layout is KVLayout.NHD else (pages, heads, self.page_size, dim)
        )

    def layer(self, index: int) -> LayerKV:
        """Pages of a layer."""
        return self._layers[index]

    def wait_layer(self, index: int) -> None:
        """Record the call."""
        self.waited.append(index)

    def layer_written(self, index: int) -> None:
        """Record the call."""
        self.written.append(index)

    def share(self, session: Session, tokens: int) -> Session:
        """A new session that begins with the first ``tokens`` (whole pages) of another and holds the same pages."""
        return Session(session.pages[: tokens // self.page_size], tokens // self.page_size * self.page_size)

    def foreign(self) -> int:
        """A page that is nobody's, and stays as it is: not a number."""
        return int(self._free.pop())

    def close(self, session: Session) -> None:
        """Give the session's pages back (not for sessions that share)."""
        self._free.extend(session.pages)
        session.pages, session.length = [], 0

    def batch(
        self,
        extend: Sequence[tuple[Session, Sequence[int]]] = (),
        decode: Sequence[tuple[Session, Sequence[int]]] = (),
        *,
        all_logits: bool = False,
        prefix_intervals: Sequence[Sequence[int]] = (),
        inputs_embeds: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """A batch that appends the given tokens to the sessions: extend rows first, then decode rows (all of one width)."""
        rows = [*extend, *decode]
        widths = {len(tokens) for _, tokens in decode}
        if len(widths) > 1:
            raise ValueError("decode rows must have one width")
        query_lens = np.array([len(tokens) for _, tokens in rows], dtype=np.int32)
        context_lens = np.array([session.length for session, _ in rows], dtype=np.int32)
        slots, positions = [], []
        for session, tokens in rows:
            at = np.arange(session.length, session.length + len(tokens))
            while len(session.pages) * self.page_size < session.length + len(tokens):
                session.pages.append(self._free.pop())
            positions.append(at)
            slots.append(np.array(session.pages)[at // self.page_size] * self.page_size + at % self.page_size)
            session.length += len(tokens)
        width = max(max(len(session.pages) for session, _ in rows), self.table_width)
        # Entries past a row's pages may hold anything.
        table = np.full((len(rows), width), 2**30, dtype=np.int32)
        for row, (session, _) in enumerate(rows):
            table[row, : len(session.pages)] = session.pages
        ends = np.concatenate(([0], np.cumsum(query_lens)))
        seq_lens = context_lens + query_lens
        host = HostBatch(
            slots=np.arange(len(rows), dtype=np.int32),
            context_lens=context_lens,
            query_lens=query_lens,
            seq_lens=seq_lens,
            prefix_intervals=np.array(prefix_intervals, dtype=np.int32).reshape(-1, 4),
        )
        ids = np.concatenate([np.asarray(tokens, dtype=np.int64) for _, tokens in rows])
        return ForwardBatch(
            num_rows=len(rows),
            num_extend_rows=len(extend),
            num_tokens=int(ends[-1]),
            num_extend_tokens=int(ends[len(extend)]),
            decode_width=widths.pop() if widths else 1,
            max_seq_len=int(seq_lens.max()),
            input_ids=self._tensor(ids),
            positions=self._tensor(np.concatenate(positions).astype(np.int64)),
            query_start=self._tensor(ends.astype(np.int32)),
            seq_lens=self._tensor(seq_lens),
            page_tables=[self._tensor(table)],
            slot_mapping=[self._tensor(np.concatenate(slots).astype(np.int64))],
            output_index=None if all_logits else self._tensor(ends[1:] - 1),
            host=host,
            inputs_embeds=inputs_embeds,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    @property
    def state(self) -> Mapping[int, LayerKV]:
        """Every layer's pages."""
        return dict(self._layers)

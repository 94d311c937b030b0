"""Captured steps that hold a piece of a prompt beside decodes: what queueing hundreds of launches would cost the host is what such a step cannot afford.

A graph has room for ``tokens`` prompt tokens of at most ``EXTEND_ROWS`` rows, then for ``rows`` decodes of one token. Prompt rows come first as in every
batch, and after them a row that takes the prompt tokens left over; places that a step leaves free belong to the spare slot and write nothing. The decode
backend computes the prompt rows too.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.interfaces.attention import AttentionBackend
from tokenspeed.interfaces.batch import ForwardBatch, HostBatch
from tokenspeed.interfaces.model import CausalLM
from tokenspeed.runtime.graphs import Capture, GraphOutput
from tokenspeed.runtime.page_tables import PageTables
from tokenspeed.runtime.plan import SAMPLES, PlanView
from tokenspeed.runtime.sampler import guard
from tokenspeed.runtime.transfer import upload_into

__all__ = ["EXTEND_ROWS", "MixedGraphs", "mixed_sizes"]

#: Rows with a piece of a prompt in one captured step.
EXTEND_ROWS = 8

#: Rows before the decodes: those and the one that takes what is left over.
_BEFORE = EXTEND_ROWS + 1

# Close together: the scheduler cuts the chunks of steps under a bound to these sizes.
_TOKENS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
_ROWS = (32, 64, 256)

Int32 = npt.NDArray[np.int32]


def mixed_sizes(max_rows: int, max_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prompt tokens, decode rows) of the graphs to capture, ascending; no tokens where a step is too small for any."""
    rows = {size for size in _ROWS if size < max_rows} | {min(max_rows, _ROWS[-1])}
    return tuple(size for size in _TOKENS if size <= max_tokens), tuple(sorted(rows))


def _captured(backend: AttentionBackend) -> tuple[int, ...]:
    """Variants that mixed steps are captured in: not the least one, which the next serves too, as there are many sizes."""
    return backend.graph_variants[1:] or backend.graph_variants


class _Fields:
    """Where each int32 input of a graph lies in the one array that is uploaded for it."""

    def __init__(self, tokens: int, rows: int) -> None:
        self.tokens, self.rows = tokens, rows
        all_tokens, all_rows = tokens + rows, _BEFORE + rows
        lengths = {
            "ids": all_tokens,
            "positions": all_tokens,
            "slots": all_tokens,
            "row_slots": all_rows,
            "seq_lens": all_rows,
            "query_start": all_rows + 1,
            "out_index": all_rows,
            "out_slots": all_rows,
        }
        ends = list(itertools.accumulate(-(-length // 4) * 4 for length in lengths.values()))  # each begins at 16 bytes
        self._spans = {name: (end - -(-n // 4) * 4, n) for (name, n), end in zip(lengths.items(), ends, strict=True)}
        self.size = ends[-1]

    def host(self, spare: int) -> tuple[Int32, dict[str, Int32]]:
        """A new array and its fields, as of a step without rows."""
        packed = np.zeros(self.size, dtype=np.int32)
        fields = {name: packed[first : first + length] for name, (first, length) in self._spans.items()}
        for name in ("slots", "row_slots", "out_slots"):
            fields[name][:] = spare
        fields["seq_lens"][_BEFORE:] = 1
        fields["query_start"][_BEFORE:] = self.tokens + np.arange(self.rows + 1)
        return packed, fields

    def on_device(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of the device's copy."""
        return {name: packed[first : first + length] for name, (first, length) in self._spans.items()}


class MixedGraphs:
    """Mixed steps of one rank, captured by ``capture`` and replayed by ``replay``.

    Args:
        backends: decode backends of the model's cache groups; all of them ``captures_extend``.
        argmax: kernel ``sampling.argmax``.
        last_tokens: (slots + 1) int64 on the device; each replay stores its rows' tokens there.
        tokens, rows: sizes of the graphs, ascending; every pair is captured.
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
        tokens: Sequence[int],
        rows: Sequence[int],
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
        self._token_sizes, self._row_sizes = tuple(tokens), tuple(rows)
        self._max_seq_len = max_seq_len
        self._fields = {(t, r): _Fields(t, r) for t in self._token_sizes for r in self._row_sizes}
        device, most = last_tokens.device, _BEFORE + self._row_sizes[-1]
        self._inputs = torch.zeros(max(f.size for f in self._fields.values()), dtype=torch.int32, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._logits = torch.zeros((most, vocab_size), dtype=dtype, device=device)
        self._minus_one = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._replays: dict[tuple[int, int, tuple[int, ...]], Callable[[], None]] = {}

    @property
    def token_sizes(self) -> tuple[int, ...]:
        """Prompt tokens that the graphs have room for, ascending."""
        return self._token_sizes

    @property
    def planned(self) -> int:
        """Graphs that ``capture`` makes."""
        return len(self._fields) * prod(len(_captured(backend)) for backend in self._backends)

    @property
    def count(self) -> int:
        """Captured graphs."""
        return len(self._replays)

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Capture every pair of sizes in every variant of the backends, the largest first."""
        variants = list(itertools.product(*(_captured(backend) for backend in self._backends)))
        for key in reversed(list(self._fields)):
            packed, fields = self._fields[key].host(self._tables.spare)
            upload_into(self._inputs, packed)
            for variant in variants:
                batch = self._batch(key, fields, np.zeros((0, 4), dtype=np.int32))
                for backend, number in zip(self._backends, variant, strict=True):
                    backend.init_capture_metadata(batch, number)
                self._replays[*key, variant] = capture(lambda key=key, batch=batch: self._step(key, batch))  # type: ignore[misc]

    def serves(self, plan: PlanView) -> bool:
        """Whether a graph has room for ``plan``'s prompt tokens and its decodes, which have one token each."""
        extends, decodes = plan.num_extend_rows, plan.num_rows - plan.num_extend_rows
        return (
            0 < extends <= EXTEND_ROWS
            and 0 <= plan.num_tokens - decodes <= self._token_sizes[-1]
            and decodes <= self._row_sizes[-1]
            and int(plan.query_lens[extends:].sum()) == decodes
        )

    def replay(self, plan: PlanView) -> tuple[GraphOutput, npt.NDArray[np.int64]]:
        """Queue ``plan``, which ``serves`` accepts and whose deltas the page tables hold. Also returns where the rows that sample stand in the output."""
        extends, decodes = plan.num_extend_rows, plan.num_rows - plan.num_extend_rows
        prompt = plan.num_tokens - decodes
        key = (
            self._token_sizes[bisect_left(self._token_sizes, prompt)],
            self._row_sizes[bisect_left(self._row_sizes, decodes)],
        )
        packed, fields = self._fields[key].host(self._tables.spare)
        query, context = plan.query_lens[:extends], plan.context_lens[:extends]
        ends = np.cumsum(query)
        where = np.arange(prompt) + np.repeat(context - (ends - query), query)
        for first, rows, ids, slots, positions in (
            (0, prompt, plan.input_ids[:prompt], np.repeat(plan.slots[:extends], query), where),
            (key[0], decodes, plan.input_ids[prompt:], plan.slots[extends:], plan.context_lens[extends:]),
        ):
            at = slice(first, first + rows)
            fields["ids"][at], fields["slots"][at], fields["positions"][at] = ids, slots, positions
        fields["query_start"][1 : extends + 1] = ends
        fields["query_start"][extends + 1 : _BEFORE] = prompt
        samples = np.flatnonzero(plan.flags & SAMPLES)
        place = np.where(samples < extends, samples, samples - extends + _BEFORE)
        rows_at = np.concatenate([np.arange(extends), _BEFORE + np.arange(decodes)])
        fields["row_slots"][rows_at] = plan.slots
        fields["seq_lens"][rows_at] = plan.context_lens + plan.query_lens
        last = np.concatenate([ends - 1, key[0] + np.arange(decodes)])
        fields["out_index"][place], fields["out_slots"][place] = last[samples], plan.slots[samples]
        upload_into(self._inputs, packed)
        intervals = plan.prefix_intervals
        if intervals.size:
            shift = _BEFORE - extends
            intervals = intervals + np.array([shift, shift, 0, 0], dtype=np.int32)
        batch = self._batch(key, fields, intervals)
        for backend in self._backends:
            backend.init_replay_metadata(batch)
        variant = tuple(max(backend.graph_variant, _captured(backend)[0]) for backend in self._backends)
        self._replays[*key, variant]()
        count = _BEFORE + key[1]
        return GraphOutput(tokens=self._tokens[:count], logits=self._logits[:count]), place

    def _batch(self, key: tuple[int, int], fields: dict[str, Int32], intervals: Int32) -> ForwardBatch:
        """The batch without the device tensors that only the graph makes."""
        tokens, rows = key
        query_lens = np.ones(_BEFORE + rows, dtype=np.int32)
        query_lens[:_BEFORE] = np.diff(fields["query_start"][: _BEFORE + 1])
        query_lens[EXTEND_ROWS] = 0  # what is left over has nothing to attend to
        nothing = self._inputs[:0]
        return ForwardBatch(
            num_rows=_BEFORE + rows,
            num_extend_rows=_BEFORE,
            num_tokens=tokens + rows,
            num_extend_tokens=tokens,
            decode_width=1,
            max_seq_len=self._max_seq_len,
            input_ids=nothing,
            positions=nothing,
            query_start=nothing,
            seq_lens=nothing,
            page_tables=[],
            slot_mapping=[],
            output_index=None,
            host=HostBatch(
                slots=fields["row_slots"],
                context_lens=fields["seq_lens"] - query_lens,
                query_lens=query_lens,
                seq_lens=fields["seq_lens"],
                prefix_intervals=intervals,
            ),
            captured=True,
        )

    def _step(self, key: tuple[int, int], batch: ForwardBatch) -> None:
        """What a graph does."""
        fields = self._fields[key].on_device(self._inputs)
        slots = fields["slots"].to(torch.int64)
        known = fields["ids"].to(torch.int64)
        batch.input_ids = torch.where(known < 0, self._last_tokens.index_select(0, slots), known)
        batch.positions = fields["positions"].to(torch.int64)
        batch.seq_lens, batch.query_start = fields["seq_lens"], fields["query_start"]
        row_slots = fields["row_slots"].to(torch.int64)
        batch.page_tables = [table.index_select(0, row_slots) for table in self._tables.device]
        batch.slot_mapping = list(self._places(slots, batch.positions))
        hidden = self._model(batch).index_select(0, fields["out_index"].to(torch.int64))
        logits = self._model.logits(hidden)
        tokens, _ = guard(self._argmax(logits), logits)
        count = len(row_slots)
        self._logits[:count].copy_(logits)
        self._tokens[:count].copy_(tokens)
        self._last_tokens.index_copy_(0, fields["out_slots"].to(torch.int64), tokens.clamp_min(0))

    def _places(self, slots: torch.Tensor, positions: torch.Tensor) -> Iterator[torch.Tensor]:
        """Where each token's keys and values go, per cache group, -1 for those of no row; or its row's state, of which there is one for those of no row."""
        for table, page_size in zip(self._tables.device, self._page_sizes, strict=True):
            if page_size == 0:
                yield table[:, 0].index_select(0, slots).to(torch.int64)
                continue
            page = table.view(-1).index_select(0, slots * table.shape[1] + positions // page_size)
            place = page.to(torch.int64) * page_size + positions % page_size
            yield torch.where(slots == self._tables.spare, self._minus_one, place)

"""A model of two full groups, a window and a recurrent state whose next token is a hash of what it finds in all of them: a page or a state that is
another's, stale, missing or still on its way changes it. And copies to and from the host that do everything that real ones may do at the worst time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.interfaces.model import CausalLM
from tokenspeed.runtime.host_pool import HostPool
from tokenspeed.runtime.kv_pool import KVPool
from tokenspeed.runtime.page_copies import PageCopies, PageMove
from tokenspeed.types import CacheGroup

PAGE, VOCAB, WINDOW, INTERVAL = 4, 997, 6, 8
GROUPS = (
    CacheGroup(kind="full", layers=(0,), kv_heads=1, head_dim=1, v_head_dim=1),
    CacheGroup(kind="window", layers=(1,), kv_heads=1, head_dim=1, v_head_dim=1, window=WINDOW),
    CacheGroup(kind="recurrent", layers=(2,), states=((2,), (1, 1)), state_dtypes=("float32",) * 2, interval=INTERVAL),
    CacheGroup(kind="full", layers=(3,), kv_heads=2, head_dim=1, v_head_dim=1),
)


def step(state: int, token: int) -> int:
    """The recurrence."""
    return (state * 31 + token + 1) % 65_521


def run(tokens: Sequence[int]) -> int:
    """The state behind ``tokens``; a zero state is that behind none."""
    state = 0
    for token in tokens:
        state = step(state, token)
    return state


def choose(full: Sequence[int], twin: Sequence[int], window: Sequence[int], state: int) -> int:
    """The next token, of what each group holds."""
    return (run(full) + 3 * run(twin) + 7 * run(window) + 11 * state) % VOCAB


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """``count`` tokens after ``prompt``, by the definition."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(choose(tokens, tokens, tokens[-WINDOW:], run(tokens)))
    return tokens[len(prompt) :]


class HybridHashModel(CausalLM):
    """Writes token ids into the pages of three groups and steps the state of the fourth, then reads all of them."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__()
        self.wait_layer = pool.wait_layer
        self.pages = {group: pool.layer(GROUPS[group].layers[0]).k[..., 0, :] for group in (0, 1, 3)}
        self.state, self.mirror = pool.states(2)  # (states + 1, 2), (states + 1, 1, 1)

    @classmethod
    def cache_groups(cls, config: Any, tp_size: int) -> list[CacheGroup]:
        return list(GROUPS)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        for group, pages in self.pages.items():
            self.wait_layer(GROUPS[group].layers[0])
            at, kept = (
                batch.slot_mapping[group],
                batch.slot_mapping[group] >= 0,
            )  # rows that fill a graph up write nothing
            pages.reshape(-1)[at[kept]] = batch.input_ids[kept].float() + 1
        start, hidden = batch.query_start.tolist(), torch.zeros(batch.num_tokens, 1)
        for row in range(batch.num_rows):
            if start[row + 1] == start[row]:
                continue
            length = int(batch.seq_lens[row])
            begin = length - (start[row + 1] - start[row])
            at = int(batch.page_tables[2][row, 0])
            assert batch.slot_mapping[2][start[row] : start[row + 1]].eq(at).all()
            if batch.slot_mapping[0][start[row]] < 0:
                self.state[at] = self.mirror[at] = -1  # as a kernel that knows nothing of filling would
                continue
            full, twin = self.read(0, batch, row, 0, length), self.read(3, batch, row, 0, length)
            first = max(0, begin - WINDOW + 1)
            window = self.read(1, batch, row, first, length)
            state = int(self.state[at, 0])
            for end in range(begin + 1, length + 1):
                state = step(state, full[end - 1])
                seen = window[max(0, end - WINDOW - first) : end - first]
                hidden[start[row] + end - begin - 1] = choose(full[:end], twin[:end], seen, state + self.torn(at))
            self.state[at] = self.mirror[at] = state
        return hidden

    def torn(self, at: int) -> int:
        """Not 0 where the tensors of a state are not of one copy."""
        return int(self.state[at, 0] != self.state[at, 1]) + int(self.state[at, 0] != self.mirror[at, 0, 0])

    def read(self, group: int, batch: ForwardBatch, row: int, begin: int, end: int) -> list[int]:
        """Tokens [begin, end) of a row, from the pages that its table names for them and no others."""
        pages = batch.page_tables[group][row, begin // PAGE : -(-end // PAGE)].long()
        found: list[int] = (self.pages[group][pages].reshape(-1) - 1).long().tolist()
        return found[begin % PAGE : begin % PAGE + end - begin]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return -(torch.arange(VOCAB)[None] - hidden).abs()

    def load_weights(self, weights: Any) -> set[str]:
        return set()


class TwinHashModel(HybridHashModel):
    """The two full groups alone, and the same tokens: what the others would hold is worked out from the first."""

    GROUPS = (GROUPS[0], GROUPS[3])

    def __init__(self, pool: KVPool) -> None:
        CausalLM.__init__(self)
        self.wait_layer = pool.wait_layer
        self.pages = {group: pool.layer(each.layers[0]).k[..., 0, :] for group, each in enumerate(self.GROUPS)}

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        for group, pages in self.pages.items():
            self.wait_layer(self.GROUPS[group].layers[0])
            pages.reshape(-1)[batch.slot_mapping[group]] = batch.input_ids.float() + 1
        start, hidden = batch.query_start.tolist(), []
        for row in range(batch.num_rows):
            length = int(batch.seq_lens[row])
            full, twin = (self.read(group, batch, row, 0, length) for group in (0, 1))
            for end in range(length - (start[row + 1] - start[row]) + 1, length + 1):
                hidden.append([choose(full[:end], twin[:end], full[:end][-WINDOW:], run(full[:end]))])
        return torch.tensor(hidden, dtype=torch.float32)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Few families, so that prefixes are shared, and lengths on both sides of pages and intervals."""
    source = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        shared, own = int(source.integers(0, 30)), int(source.integers(1, 12))
        family = int(source.integers(0, 3))
        made.append([*range(100 * family, 100 * family + shared), *source.integers(400, 900, own).tolist()])
    return made


class HostileCopies(PageCopies):
    """Copies in the engine's own thread, at a time that a seed decides: some plans later, in any order, or when a layer is waited for and not before.

    From the beginning of a load to its end its pages hold garbage, and for good where it fails. What fails may have brought some leading pages.

    Args:
        failing: share of operations that fail.
    """

    def __init__(self, host: HostPool, done: Callable[[int, int], None], *, seed: int, failing: float = 0.0) -> None:
        self._host, self._done, self._failing = host, done, failing
        self._random = random.Random(seed)
        self._writes: list[PageMove] = []
        self._loads: list[tuple[PageMove, int]] = []  # with the pages that will be good

    def write_back(self, moves: Sequence[PageMove]) -> None:
        self._writes += moves

    def load_back(self, moves: Sequence[PageMove]) -> None:
        for move in moves:
            self._fill(move, 0, len(move.host))
            self._loads.append((move, self._good(move)))

    def wait_layer(self, layer: int) -> None:
        for load in list(self._loads):
            if any(part.layer == layer for part in self._host.parts[load[0].group]):
                self._load(load)

    def wait_all(self) -> None:
        for load in list(self._loads):
            self._load(load)

    def poll(self) -> None:
        self._random.shuffle(self._writes)
        self._random.shuffle(self._loads)
        for move in [each for each in self._writes if self._random.random() < 0.3]:
            self._write(move)
        for load in [each for each in self._loads if self._random.random() < 0.3]:
            self._load(load)

    def settle(self) -> None:
        self.wait_all()
        for move in list(self._writes):
            self._write(move)

    def _good(self, move: PageMove) -> int:
        fails = self._random.random() < self._failing
        return self._random.randrange(len(move.host)) if fails else len(move.host)

    def _write(self, move: PageMove) -> None:
        self._writes.remove(move)
        good = self._good(move)
        rows = self._host.rows(move.group)
        for device, host in zip(move.device[:good].tolist(), move.host[:good].tolist(), strict=True):
            at = 0
            for part in self._host.parts[move.group]:
                for tensor in part.tensors:
                    raw = tensor[device].contiguous().view(torch.uint8).view(-1)
                    rows[host, at : at + len(raw)] = raw
                    at += len(raw)
        self._done(move.number, good)

    def _load(self, load: tuple[PageMove, int]) -> None:
        self._loads.remove(load)
        move, good = load
        rows = self._host.rows(move.group)
        for device, host in zip(move.device[:good].tolist(), move.host[:good].tolist(), strict=True):
            at = 0
            for part in self._host.parts[move.group]:
                for tensor in part.tensors:
                    size = tensor[device].nbytes
                    tensor[device] = rows[host, at : at + size].view(tensor.dtype).view(tensor[device].shape)
                    at += size
        self._done(move.number, good)

    def _fill(self, move: PageMove, begin: int, end: int) -> None:
        """Garbage that passes for tokens and states."""
        for part in self._host.parts[move.group]:
            for tensor in part.tensors:
                tensor[move.device[begin:end].astype(np.int64)] = float(self._random.randrange(1, VOCAB))

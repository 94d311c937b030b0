"""Sampling parameters by slot, and their gathered form for the rows of one step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.builtin.kernels.draw import RandomRows
from tokenspeed.runtime.plan import SlotRequest
from tokenspeed.runtime.transfer import to_device

__all__ = ["PenaltyRows", "RaggedRows", "SamplingRows", "SlotSampling"]

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PenaltyRows:
    """Rows with penalties. ``index`` and ``slots`` (n) int64; the penalties (n, 1) fp32."""

    index: torch.Tensor
    slots: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class RaggedRows:
    """Entries (row, token id, value) of per-request lists: ``rows`` (n) int64 host array, ``ids`` (n) int64, ``values`` (n) host fp32."""

    rows: Int64
    ids: Int64
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """The parameters of the rows that sample in a step, in row order; parts that no row asks for are ``None``.

    Attributes:
        bias: logit biases.
        masked: end ids of rows with ``min_tokens``; the value is that number.
        grammar: (n) rows with a grammar, which also sees to their ``min_tokens``.
        logprobs: (n) rows that want log probabilities; ``top`` (n) how many alternatives.
    """

    random: RandomRows | None
    penalties: PenaltyRows | None
    bias: RaggedRows | None
    masked: RaggedRows | None
    logprobs: Int64 | None
    top: Int64 | None
    grammar: Int64 | None

    @property
    def plain(self) -> bool:
        """Every row just takes the largest logit."""
        return (
            self.random is None
            and self.penalties is None
            and self.bias is None
            and self.masked is None
            and self.logprobs is None
            and self.grammar is None
        )

    @property
    def only_random(self) -> bool:
        """Rows draw or take the largest of the logits as the model gave them."""
        return dataclasses.replace(self, random=None).plain


class SlotSampling:
    """One entry per slot, loaded when a request begins there. ``rows`` is cached while the batch stays the same."""

    def __init__(self, *, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._max_slots = max_slots
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_slots)
        self._top_k = np.zeros(max_slots, dtype=np.int64)
        self._top_p = np.ones(max_slots)
        self._min_p = np.zeros(max_slots)
        self._presence = np.zeros(max_slots, dtype=np.float32)
        self._frequency = np.zeros(max_slots, dtype=np.float32)
        self._repetition = np.ones(max_slots, dtype=np.float32)
        self._seeds = np.zeros(max_slots, dtype=np.int64)
        self._logprobs = np.full(max_slots, -1, dtype=np.int64)
        self._prompt_logprobs = np.full(max_slots, -1, dtype=np.int64)
        self._prompt: list[npt.NDArray[np.int32]] = [np.zeros(0, dtype=np.int32)] * max_slots
        self._bias: list[tuple[tuple[int, float], ...]] = [()] * max_slots
        self._masked: list[tuple[tuple[int, float], ...]] = [()] * max_slots
        self._grammar = np.zeros(max_slots, dtype=np.bool_)
        self._counts: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None
        self._cached_key = b""
        self._cached_rows: SamplingRows | None = None

    def load(self, request: SlotRequest) -> None:
        """Take over ``request.slot`` for a request."""
        slot, params = request.slot, request.params
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._repetition[slot] = params.repetition_penalty
        self._seeds[slot] = request.seed
        self._logprobs[slot] = params.logprobs
        self._prompt_logprobs[slot] = params.prompt_logprobs
        self._bias[slot] = params.logit_bias
        self._grammar[slot] = request.grammar is not None
        # A grammar that allows an end alone comes before min_tokens: it masks for both.
        early = params.min_tokens > 0 and request.grammar is None
        self._masked[slot] = tuple((i, params.min_tokens) for i in request.end_ids) if early else ()
        wants_prompt = params.prompt_logprobs >= 0 or self._penalised(slot)
        self._prompt[slot] = np.frombuffer(request.prompt, dtype="<i4") if wants_prompt else np.zeros(0, dtype=np.int32)
        if self._penalised(slot):
            counts, in_prompt = self._penalty_state()
            counts[slot].zero_()
            in_prompt[slot].zero_()
            in_prompt[slot].index_fill_(0, to_device(self._prompt[slot].astype(np.int64), self._device), True)
            if request.output:
                output = np.frombuffer(request.output, dtype="<i4").astype(np.int64)
                before = np.bincount(output, minlength=self._vocab_size).astype(np.int32)
                counts[slot] += to_device(before, self._device)
        self._cached_rows = None

    def rows(self, slots: npt.NDArray[np.int32]) -> SamplingRows:
        """Parameters of the rows in ``slots`` (rows) order."""
        key = slots.tobytes()
        if self._cached_rows is None or key != self._cached_key:
            self._cached_rows, self._cached_key = self._gather(slots), key
        return self._cached_rows

    def prompt_logprobs(self, slot: int) -> int:
        """Alternatives per prompt token that the request in ``slot`` wants; -1 is none at all."""
        return int(self._prompt_logprobs[slot])

    def wanting_prompt_logprobs(self, slots: npt.NDArray[np.int32]) -> Int64:
        """Indices into ``slots`` of requests that want log probabilities of their prompt."""
        return np.flatnonzero(self._prompt_logprobs[slots] >= 0)

    def prompt(self, slot: int) -> npt.NDArray[np.int32]:
        """Prompt ids of a request that wants penalties or prompt log probabilities; empty for others."""
        return self._prompt[slot]

    def history(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of penalised slots (n): how often each token was generated, (n, vocabulary) int32, and whether the prompt holds it, bool."""
        counts, in_prompt = self._penalty_state()
        return counts.index_select(0, slots), in_prompt.index_select(0, slots)

    def count(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add generated ``tokens`` (n) to the history of penalised ``slots`` (n); the pairs' slots are distinct."""
        counts, _ = self._penalty_state()
        counts[slots, tokens] += 1

    def _penalised(self, slot: int) -> bool:
        return bool(self._presence[slot] != 0 or self._frequency[slot] != 0 or self._repetition[slot] != 1)

    def _penalty_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Made when the first request with a penalty arrives: most servers never see one."""
        if self._counts is None or self._in_prompt is None:
            shape = (self._max_slots, self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return self._counts, self._in_prompt

    def _gather(self, slots: npt.NDArray[np.int32]) -> SamplingRows:
        wanted = np.flatnonzero(self._logprobs[slots] >= 0)
        grammar = np.flatnonzero(self._grammar[slots])
        return SamplingRows(
            random=self._random(slots),
            penalties=self._penalties(slots),
            bias=_ragged(self._bias, slots),
            masked=_ragged(self._masked, slots),
            logprobs=wanted if len(wanted) else None,
            top=self._logprobs[slots[wanted]] if len(wanted) else None,
            grammar=grammar if len(grammar) else None,
        )

    def _random(self, slots: npt.NDArray[np.int32]) -> RandomRows | None:
        index = np.flatnonzero(self._temperature[slots] > 0)
        if not len(index):
            return None
        chosen = slots[index]
        return RandomRows(
            index=self._put(index),
            temperature=self._put(self._temperature[chosen]),
            top_k=self._put(self._top_k[chosen]),
            top_p=self._put(self._top_p[chosen]),
            min_p=self._put(self._min_p[chosen]),
            seeds=self._put(self._seeds[chosen]),
        )

    def _penalties(self, slots: npt.NDArray[np.int32]) -> PenaltyRows | None:
        presence, frequency, repetition = self._presence[slots], self._frequency[slots], self._repetition[slots]
        index = np.flatnonzero((presence != 0) | (frequency != 0) | (repetition != 1))
        if not len(index):
            return None
        return PenaltyRows(
            index=self._put(index),
            slots=self._put(slots[index].astype(np.int64)),
            presence=self._put(presence[index, None]),
            frequency=self._put(frequency[index, None]),
            repetition=self._put(repetition[index, None]),
        )

    def _put(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, self._device)


def _ragged(lists: list[tuple[tuple[int, float], ...]], slots: npt.NDArray[np.int32]) -> RaggedRows | None:
    entries = [(row, token, value) for row, slot in enumerate(slots.tolist()) for token, value in lists[slot]]
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    return RaggedRows(
        rows=np.array(rows, dtype=np.int64),
        ids=np.array(ids, dtype=np.int64),
        values=np.array(values, dtype=np.float32),
    )

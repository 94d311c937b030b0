"""Draws the next token of each sampling row, vectorised over rows. ``reference_sampler`` is its definition, kept for comparison.

Order, as in vLLM: logit bias, mask of end ids before ``min_tokens``, mask of the grammar, penalties (repetition over prompt and output; frequency and presence
over output), temperature, filters, draw. Temperature 0 takes the largest logit, of ties the lowest id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.builtin.kernels.sampling import draw as reference_draw
from tokenspeed.runtime.grammar import GrammarMasks, SlotGrammars
from tokenspeed.runtime.logprobs import LogprobRows, gather_logprobs
from tokenspeed.runtime.plan import SlotRequest
from tokenspeed.runtime.slot_sampling import PenaltyRows, RaggedRows, SamplingRows, SlotSampling
from tokenspeed.runtime.transfer import Download, to_device

__all__ = ["SampleResult", "Sampler", "guard"]

_NEVER = float("-inf")


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """What was drawn for n sampling rows.

    Attributes:
        tokens: (n, W) int64 on the device; -1 where the row is bad.
        bad: (n) bool, rows whose logits held NaN or no finite maximum.
        faults: what is wrong with a bad row where it is not its logits.
        logprobs: of the rows in ``logprob_rows`` (m) int64, ``None`` when none asked; ``top`` (m) is how many alternatives each wants.
    """

    tokens: torch.Tensor
    bad: torch.Tensor
    faults: dict[int, str] = field(default_factory=dict)
    logprobs: LogprobRows | None = None
    logprob_rows: npt.NDArray[np.int64] | None = None
    top: npt.NDArray[np.int64] | None = None


class Sampler:
    """Samples one token per row.

    Args:
        argmax: kernel ``sampling.argmax``: (R, V) -> (R) int64, lowest index of ties, -1 for a row with NaN.
        grammars: masks of rows with a grammar; ``None`` where no request can have one.
        apply_bitmask: kernel ``sampling.apply_bitmask``, for those.
        draw: kernel ``sampling.draw``, for rows with a temperature.
    """

    def __init__(
        self,
        state: SlotSampling,
        argmax: Callable[[torch.Tensor], torch.Tensor],
        *,
        grammars: SlotGrammars | None = None,
        apply_bitmask: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None,
        draw: Callable[..., torch.Tensor] = reference_draw,
    ) -> None:
        self._state = state
        self._argmax = argmax
        self._grammars = grammars
        self._apply_bitmask = apply_bitmask
        self._draw = draw

    def load(self, request: SlotRequest) -> None:
        """Take over ``request.slot`` for a request."""
        self._state.load(request)
        if self._grammars is not None:
            self._grammars.load(request)

    def sample(
        self, logits: torch.Tensor, slots: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]
    ) -> SampleResult:
        """Draw for n rows.

        Args:
            logits: (n, vocabulary) in the model's dtype; may be overwritten.
            slots: (n) slot of each row.
            positions: (n) tokens the request had generated before.
        """
        rows = self._state.rows(slots)
        if rows.plain:
            tokens, bad = guard(self._argmax(logits), logits)
            return _result(tokens, bad)
        if not rows.only_random:
            logits = logits.float()
        untouched = None
        if rows.logprobs is not None:
            untouched = logits[to_device(rows.logprobs, logits.device)]
        masks = None if rows.grammar is None else self._masks(slots[rows.grammar])
        logits = self._adjust(logits, rows, positions, masks)
        tokens, bad = guard(self._argmax(logits), logits)
        if rows.random is not None:
            random, index = rows.random, rows.random.index
            where = to_device(positions.astype(np.int64), logits.device)[index]
            drawn = self._draw(
                logits, index, random.temperature, random.top_k, random.top_p, random.min_p, random.seeds, where
            )
            tokens[index] = torch.where(bad[index], -1, drawn)
        faults: dict[int, str] = {}
        if masks is not None and rows.grammar is not None:
            faults = self._follow(slots, rows.grammar, masks, tokens, bad)
        if rows.penalties is not None:
            self._state.count(rows.penalties.slots, tokens[rows.penalties.index].clamp_min(0))
        if untouched is None or rows.logprobs is None or rows.top is None:
            return _result(tokens, bad, faults=faults)
        chosen = tokens[to_device(rows.logprobs, logits.device)].clamp_min(0)
        logprobs = gather_logprobs(untouched, chosen, int(rows.top.max()))
        return _result(tokens, bad, faults=faults, logprobs=logprobs, logprob_rows=rows.logprobs, top=rows.top)

    def _masks(self, slots: npt.NDArray[np.int32]) -> GrammarMasks:
        assert self._grammars is not None, "requests with a grammar are admitted only where there is a backend"
        return self._grammars.masks(slots)

    def _follow(
        self,
        slots: npt.NDArray[np.int32],
        index: npt.NDArray[np.int64],
        masks: GrammarMasks,
        tokens: torch.Tensor,
        bad: torch.Tensor,
    ) -> dict[int, str]:
        """Mark the rows whose grammar failed as bad, in place, and remember what the others drew. Returns what is wrong, by row."""
        faults = {int(index[row]): text for row, text in masks.faults.items()}
        for row in faults:
            tokens[row], bad[row] = -1, True
        assert self._grammars is not None, "there are masks"
        drawn = tokens[to_device(index, tokens.device), None]
        self._grammars.drawn(slots[index], Download(drawn))
        return faults

    def _adjust(
        self, logits: torch.Tensor, rows: SamplingRows, positions: npt.NDArray[np.int32], masks: GrammarMasks | None
    ) -> torch.Tensor:
        """Bias, mask and penalise in place."""
        if rows.bias is not None:
            index, values = _entries(rows.bias, logits.device)
            logits.index_put_(index, values, accumulate=True)
        if rows.masked is not None:
            early = positions[rows.masked.rows] < rows.masked.values
            if early.any():
                kept = RaggedRows(
                    rows=rows.masked.rows[early], ids=rows.masked.ids[early], values=rows.masked.values[early]
                )
                index, values = _entries(kept, logits.device)
                logits.index_put_(index, torch.full_like(values, _NEVER))
        if masks is not None and rows.grammar is not None:
            assert self._apply_bitmask is not None, "there are grammars, so there is a kernel"
            bits = to_device(masks.bits, logits.device)
            self._apply_bitmask(logits, bits, to_device(rows.grammar, logits.device))
        if rows.penalties is not None:
            logits[rows.penalties.index] = self._penalise(logits[rows.penalties.index], rows.penalties)
        return logits

    def _penalise(self, logits: torch.Tensor, rows: PenaltyRows) -> torch.Tensor:
        counts, in_prompt = self._state.history(rows.slots)
        generated = counts > 0
        scaled = torch.where(logits > 0, logits / rows.repetition, logits * rows.repetition)
        logits = torch.where(generated | in_prompt, scaled, logits)
        return logits - rows.frequency * counts - rows.presence * generated


def _entries(ragged: RaggedRows, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    rows, ids = to_device(ragged.rows, device), to_device(ragged.ids, device)
    return (rows, ids), to_device(ragged.values, device)


def guard(tokens: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, bad). A NaN anywhere (-1 from argmax) or a largest logit that is not finite makes that row bad, and no other; bad rows hold -1."""
    if logits.device.type == "cpu" and logits.dtype is torch.float32:
        return _guard_on_host(tokens.numpy(), logits.numpy())
    best = logits.gather(1, tokens.clamp_min(0)[:, None])[:, 0]
    bad = (tokens < 0) | ~torch.isfinite(best)
    return tokens.masked_fill(bad, -1), bad


def _guard_on_host(tokens: npt.NDArray[np.int64], logits: npt.NDArray[np.float32]) -> tuple[torch.Tensor, torch.Tensor]:
    """``guard`` in a few small array operations: a step of one row notices each of torch's."""
    best = logits[np.arange(len(tokens)), tokens]  # of -1 the last one, which does not count
    bad = (tokens < 0) | ~np.isfinite(best)
    return torch.from_numpy(np.where(bad, -1, tokens)), torch.from_numpy(bad)


def _result(
    tokens: torch.Tensor,
    bad: torch.Tensor,
    *,
    faults: dict[int, str] | None = None,
    logprobs: LogprobRows | None = None,
    logprob_rows: npt.NDArray[np.int64] | None = None,
    top: npt.NDArray[np.int64] | None = None,
) -> SampleResult:
    return SampleResult(
        tokens=tokens[:, None],
        bad=bad,
        faults=faults or {},
        logprobs=logprobs,
        logprob_rows=logprob_rows,
        top=top,
    )

"""Log probabilities for clients: of the model's own distribution, before temperature, penalties, bias and masks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["LOGPROB_FLOOR", "LogprobRows", "gather_logprobs"]

#: Smaller log probabilities are reported as this, so that no infinity reaches JSON.
LOGPROB_FLOOR = -9999.0


@dataclass(frozen=True, kw_only=True)
class LogprobRows:
    """Log probabilities of n tokens.

    Attributes:
        chosen: (n) of the token itself; ``rank`` (n) is 1 for the likeliest.
        top_ids, top: (n, k) the k likeliest, descending, where k is the largest number any row asked for.
    """

    chosen: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int64]
    top_ids: npt.NDArray[np.int64]
    top: npt.NDArray[np.float32]


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor, alternatives: int) -> LogprobRows:
    """Log probabilities of ``tokens`` (n) int64 under ``logits`` (n, vocabulary) fp32, with ``alternatives`` likeliest ones."""
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    own = logits.gather(1, tokens[:, None])
    rank = (logits > own).sum(dim=-1) + 1
    values, ids = torch.topk(logits, min(alternatives, logits.shape[1]), dim=-1)
    return LogprobRows(
        chosen=_floor(own - lse)[:, 0].cpu().numpy(),
        rank=rank.cpu().numpy(),
        top_ids=ids.cpu().numpy(),
        top=_floor(values - lse).cpu().numpy(),
    )


def _floor(logprobs: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(logprobs.float(), nan=LOGPROB_FLOOR).clamp_min(LOGPROB_FLOOR)

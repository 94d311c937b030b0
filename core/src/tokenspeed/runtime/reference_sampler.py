"""The definition of sampling, one row at a time in plain Python: slow, readable, and what the vectorised sampler is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokenspeed.builtin.kernels.draw import HEAD
from tokenspeed.messages.to_engine import SamplingParams

__all__ = ["philox_words", "reference_logits", "reference_sample"]

_NEVER = float("-inf")


def philox_words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32-10 (Salmon et al., SC 2011) on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def reference_logits(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Sequence[int],
) -> list[float]:
    """Logits after bias, mask and penalties."""
    adjusted = list(logits)
    for token, bias in params.logit_bias:
        adjusted[token] += bias
    if len(output) < params.min_tokens:
        for token in end_ids:
            adjusted[token] = _NEVER
    for token in set(prompt) | set(output):
        value = adjusted[token]
        adjusted[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(output):
        adjusted[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return adjusted


def reference_sample(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    seed: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    end_ids: Sequence[int] = (),
) -> int:
    """The next token, or -1 where the logits hold NaN or no finite maximum."""
    if any(math.isnan(value) for value in logits):
        return -1
    adjusted = reference_logits(logits, params, prompt=prompt, output=output, end_ids=end_ids)
    largest = max(adjusted)
    if not math.isfinite(largest):
        return -1
    if params.temperature <= 0:
        return adjusted.index(largest)
    scaled = [(value - largest) / params.temperature for value in adjusted]
    ids = _kept(scaled, params)
    position = len(output)
    filtered = 0 < params.top_k < len(scaled) or params.top_p < 1 or params.min_p > 0
    head, tail = (ids, []) if filtered else (ids[:HEAD], ids[HEAD:])
    if tail and _uniform(seed, position) >= _mass(scaled, head) / _mass(scaled, ids):
        head = tail
    return max(head, key=lambda token: scaled[token] + _gumbel(seed, position, token))


def _kept(scaled: Sequence[float], params: SamplingParams) -> list[int]:
    """Ids that pass the filters, likeliest first."""
    ids = sorted((i for i, value in enumerate(scaled) if value > _NEVER), key=lambda i: -scaled[i])
    if 0 < params.top_k < len(scaled):
        last = scaled[ids[min(params.top_k, len(ids)) - 1]]
        ids = [i for i in ids if scaled[i] >= last]
    if params.top_p < 1:
        mass, before, last = _mass(scaled, ids), 0.0, scaled[ids[0]]
        for token in ids:
            if before >= params.top_p * mass:
                break
            last = scaled[token]
            before += math.exp(last)
        ids = [i for i in ids if scaled[i] >= last]
    if params.min_p > 0:
        ids = [i for i in ids if scaled[i] >= math.log(params.min_p)]
    return ids


def _mass(scaled: Sequence[float], ids: Sequence[int]) -> float:
    return math.fsum(math.exp(scaled[i]) for i in ids)


def _unit(word: int) -> float:
    return (word + 0.5) * 2.0**-32


def _key(seed: int) -> tuple[int, int]:
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def _uniform(seed: int, position: int) -> float:
    return _unit(philox_words((0, position, 0, 0), _key(seed))[0])


def _gumbel(seed: int, position: int, token: int) -> float:
    return -math.log(-math.log(_unit(philox_words((token >> 2, position, 1, 0), _key(seed))[token & 3])))

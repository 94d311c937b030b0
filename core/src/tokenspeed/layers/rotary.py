"""Rotary position embedding: a configuration and the table of cosines and sines that kernels read.

Frequencies follow the published definitions: plain (Su et al. 2021), linear position interpolation (Chen et al. 2023), YaRN (Peng et al. 2023) and the
wavelength-dependent scaling of Llama 3.1. All arithmetic is fp32, in the order that the checkpoints were trained with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.errors import ModelError

__all__ = ["RopeConfig", "cos_sin_table", "inverse_frequencies", "logit_factor"]

_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """What fixes a table. Hashable: layers with equal configurations share one.

    Attributes:
        rope_type: ``default``, ``linear``, ``llama3`` or ``yarn``.
        theta: base of the frequencies.
        rotary_dim: elements of a head that are rotated, from the first on.
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        max_position: positions of the table unless the engine serves shorter contexts.
        factor: how much longer than ``original_max_position`` contexts may be.
        low_freq_factor, high_freq_factor: borders of the llama3 transition, in rotations over the original context.
        beta_fast, beta_slow: borders of the YaRN ramp, in rotations over the original context.
        truncate: YaRN's borders are rounded outwards to whole dimensions.
        attention_factor: cosines and sines are multiplied by it.
    """

    rope_type: str = "default"
    theta: float = 10000.0
    rotary_dim: int
    interleaved: bool = False
    max_position: int
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    @classmethod
    def from_hf(cls, config: Any, head_dim: int, *, interleaved: bool = False) -> RopeConfig:
        """Read ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``, of a config with attribute access.

        Raises:
            ModelError: the scaling is not one of those above, or a value it needs is missing.
        """
        given = _given(config)
        kind = given.get("rope_type") or given.get("type") or "default"
        if kind not in _TYPES:
            raise ModelError(f"rotary scaling {kind!r} is not supported (supported: {', '.join(_TYPES)})")
        partial = given.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
        longest = int(config.max_position_embeddings)
        values: dict[str, Any] = {
            "rope_type": kind,
            "theta": float(given.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0),
            "rotary_dim": int(head_dim * partial),
            "interleaved": interleaved,
            "max_position": longest,
        }
        if kind == "default":
            return cls(**values)
        original = int(given.get("original_max_position_embeddings") or longest)
        factor = given.get("factor") or (longest / original if kind == "yarn" else None)
        if factor is None:
            raise ModelError(f"rotary scaling {kind!r} needs a factor, and config.json gives none")
        values |= {"factor": float(factor), "original_max_position": original}
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            if given.get(name) is not None:
                values[name] = float(given[name])
        if kind == "yarn":
            values["truncate"] = bool(given.get("truncate", True))
            values["attention_factor"] = _yarn_attention_factor(given, float(factor))
        return cls(**values)


def _given(config: Any) -> Mapping[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def logit_factor(config: Any) -> float:
    """What a scaled rotary embedding with ``mscale_all_dim`` multiplies attention logits by, as DeepSeek's models apply YaRN's temperature."""
    given = _given(config)
    over_all, kind = given.get("mscale_all_dim"), given.get("rope_type") or given.get("type") or "default"
    return 1.0 if kind == "default" or not over_all else _temperature(float(given["factor"]), over_all) ** 2


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    mscale, over_all = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and over_all:
        return _temperature(factor, mscale) / _temperature(factor, over_all)
    return _temperature(factor, 1.0)


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """Radians per position of each pair: (rotary_dim / 2) fp32."""
    steps = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / max(rope.rotary_dim, 1)
    plain = 1.0 / (rope.theta**steps)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn(rope, steps)
    return plain


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Wavelengths that fit the original context often stay, those that hardly fit are stretched, with a linear transition between."""
    wavelength = 2 * math.pi / plain
    rotations = rope.original_max_position / wavelength
    keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - keep) * plain / rope.factor + keep * plain
    out = torch.where(rotations < rope.low_freq_factor, plain / rope.factor, plain)
    between = (rotations >= rope.low_freq_factor) & (rotations <= rope.high_freq_factor)
    return torch.where(between, mixed, out)


def _yarn(rope: RopeConfig, steps: torch.Tensor) -> torch.Tensor:
    """Dimensions that turn more than ``beta_fast`` times stay, those below ``beta_slow`` are interpolated, a ramp between."""
    dim = rope.rotary_dim

    def dimension(rotations: float) -> float:
        return dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    periods = rope.theta**steps
    keep = 1 - ramp
    return (1.0 / (rope.factor * periods)) * (1 - keep) + (1.0 / periods) * keep


def cos_sin_table(rope: RopeConfig, positions: int, device: torch.device) -> torch.Tensor:
    """(positions, rotary_dim) fp32: cosines in the first half of a row, sines in the second."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    if rope.attention_factor != 1.0:
        table *= rope.attention_factor
    return table.to(device)

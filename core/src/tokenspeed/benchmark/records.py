"""What is measured of one request, and the figures made of many.

Definitions, the same for every server: TTFT runs from the request's start (connecting included) to the first chunk that carries text; E2E to the
last chunk that carries text; TPOT is (E2E - TTFT) / (output tokens - 1); ITL is the gap between consecutive chunks with text. Output tokens are
``usage.completion_tokens`` where the server reports them, else the number of chunks with text.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Record", "percentile", "summarize"]


@dataclass(kw_only=True)
class Record:
    """One request as the client saw it. Times are seconds of one monotonic clock; ``turn`` counts from 0 within a session."""

    start: float
    session: int = 0
    turn: int = 0
    first: float | None = None
    last: float | None = None
    chunks: int = 0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    error: str | None = None
    text: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether text arrived and no error did."""
        return self.error is None and self.first is not None

    @property
    def output_tokens(self) -> int:
        """Tokens as reported by the server, else chunks with text."""
        return self.chunks if self.completion_tokens is None else self.completion_tokens

    def add_text(self, text: str, now: float) -> None:
        """A chunk with ``text`` arrived at ``now``."""
        if self.last is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now
        self.chunks += 1
        self.text.append(text)


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0 to 100) with linear interpolation between ranks. Raises ``ValueError`` on an empty sequence."""
    if not values:
        raise ValueError("percentile of nothing")
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _ms(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    figures = {f"p{q}": round(percentile(seconds, q) * 1e3, 3) for q in (50, 95, 99)}
    return {**figures, "mean": round(statistics.fmean(seconds) * 1e3, 3), "max": round(max(seconds) * 1e3, 3)}


def _rate(count: float, wall_s: float) -> float:
    return round(count / wall_s, 3) if wall_s > 0 else 0.0


def summarize(records: Sequence[Record], wall_s: float) -> dict[str, Any]:
    """The figures of a run of ``wall_s`` seconds as plain JSON; a latency is ``None`` where no request yields it."""
    done = [r for r in records if r.ok]
    outputs = sum(r.output_tokens for r in done)
    reported = [r for r in done if r.prompt_tokens is not None]
    inputs = sum(r.prompt_tokens or 0 for r in reported)
    knows_cache = any(r.cached_tokens is not None for r in done)
    cached = sum(r.cached_tokens or 0 for r in done)
    errors = [r.error for r in records if r.error is not None]
    return {
        "requests": len(records),
        "ok": len(done),
        "failed": len(records) - len(done),
        "errors": errors[:3],
        "wall_s": round(wall_s, 3),
        "request_throughput": _rate(len(done), wall_s),
        "output_tokens": outputs,
        "output_throughput": _rate(outputs, wall_s),
        "input_tokens": inputs if reported else None,
        "input_throughput": _rate(inputs, wall_s) if reported else None,
        "cached_tokens": cached if knows_cache else None,
        "cache_hit_rate": round(cached / inputs, 4) if knows_cache and inputs else None,
        "ttft_ms": _ms([r.first - r.start for r in done if r.first is not None]),
        "tpot_ms": _ms(
            [
                (r.last - r.first) / (r.output_tokens - 1)
                for r in done
                if r.first is not None and r.last is not None and r.output_tokens > 1
            ]
        ),
        "itl_ms": _ms([gap for r in done for gap in r.gaps]),
        "e2e_ms": _ms([r.last - r.start for r in done if r.last is not None]),
        "finish": {
            reason: sum(r.finish == reason for r in done) for reason in sorted({r.finish for r in done if r.finish})
        },
        "turns": _by_turn(done),
    }


def _by_turn(done: Sequence[Record]) -> list[dict[str, Any]]:
    """TTFT and cache use per turn of a conversation; empty when nothing has more than one turn."""
    turns = sorted({r.turn for r in done})
    if turns in ([], [0]):
        return []
    rows = []
    for turn in turns:
        members = [r for r in done if r.turn == turn]
        prompt = sum(r.prompt_tokens or 0 for r in members)
        rows.append(
            {
                "turn": turn,
                "requests": len(members),
                "prompt_tokens": round(prompt / len(members), 1),
                "cache_hit_rate": round(sum(r.cached_tokens or 0 for r in members) / prompt, 4) if prompt else None,
                "ttft_ms": _ms([r.first - r.start for r in members if r.first is not None]),
            }
        )
    return rows

"""What prompt tokens cost, by the rules of ``csrc/scheduler/observations.h``: plain floats, equal to the bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["PrefillModel", "PrefillStep"]


@dataclass
class PrefillStep:
    """The prompt tokens of a plan, and whether it had most of those that it could have."""

    tokens: int = 0
    attended: float = 0.0
    decodes: int = 0
    filled: bool = False


@dataclass
class PrefillModel:
    """A token costs 1, and ``weight`` for each token that it attends to."""

    weight: float = 0.0
    fitted: bool = False
    decodes_us: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def cost(self, tokens: int, context: int) -> float:
        return tokens + self.weight * (tokens * (context + 0.5 * tokens))

    def tokens_for(self, cost: float, context: int) -> int:
        linear = 1.0 + self.weight * context
        return int(2.0 * cost / (linear + math.sqrt(linear * linear + 2.0 * self.weight * cost)) + 0.5)

    def observe(self, step: PrefillStep, step_us: int) -> None:
        if step_us <= 0:
            return
        if step.tokens == 0:
            if self.decodes_us == 0.0:
                self.decodes_us = float(step_us)
            else:
                self.decodes_us += (step_us - self.decodes_us) / 16.0
            return
        if not step.filled:
            return
        x, z = float(step.tokens), step.attended
        y = max(1.0, step_us - self.decodes_us if step.decodes else float(step_us))
        products = (x * x, x * z, z * z, x * y, z * y)
        self.sums = [old + (new - old / 16.0) for old, new in zip(self.sums, products, strict=True)]
        xx, xz, zz, xy, zy = self.sums
        if xx * zz - xz * xz <= xx * zz / 16.0:
            return
        b = (zz + zz / 64.0) * xy - xz * zy
        d = xx * zy - xz * xy
        if b <= 0.0:
            return
        weight = max(0.0, d / b)
        self.weight = 0.5 * (self.weight + weight) if self.fitted else weight
        self.fitted = True

    def check(self, chunks: list[tuple[int, int]], decode_tokens: int, budget: int, page: int) -> PrefillStep:
        """``chunks`` are (tokens, context) in the order in which they were planned; the step that they make.

        Beside decodes they cost no more than a chunk of all the step's tokens without context. The first page of tokens is free of that rule, and the chunk
        that uses up the cost is rounded to a token.
        """
        alone = decode_tokens == 0
        least = min(page, budget)
        tokens = budget if alone else max(budget - decode_tokens, least)
        whole = self.cost(tokens, 0)
        left = whole
        for index, (chunk, context) in enumerate(chunks):
            assert alone or left >= 1.0 or least > 0, f"chunk {index} is planned where the cost is used up"
            assert alone or chunk <= max(self.tokens_for(max(left, 0.0), context), least, 1), (
                f"chunk {index} costs too much"
            )
            left -= self.cost(chunk, context)
            least -= chunk
        step = PrefillStep(sum(chunk for chunk, _ in chunks), 0.0, decode_tokens)
        assert step.tokens <= tokens
        for chunk, context in chunks:
            step.attended += chunk * (context + 0.5 * chunk)
        cost = step.tokens + self.weight * step.attended
        step.filled = 2 * step.tokens >= tokens or (not alone and 2.0 * cost >= whole)
        return step

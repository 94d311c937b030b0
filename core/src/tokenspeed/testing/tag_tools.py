"""Random tools, and what comes back of their calls: what the suites of parsers walk structural tags with."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

__all__ = ["Draw", "fits", "leaves", "random_tools", "with_random"]

#: Takes an example of a strategy.
Draw = Callable[[st.SearchStrategy[Any]], Any]

_SCALARS: dict[str, type | tuple[type, ...]] = {"string": str, "integer": int, "number": (int, float)}
_LEAVES: tuple[dict[str, Any], ...] = (
    {"type": "string"}, {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"},
    {"enum": ["a", "b c", "1"]}, {"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "integer"}},
    {"type": "object", "properties": {"in": {"type": "string"}, "n": {"type": "integer"}}, "required": ["in"], "additionalProperties": False},
)  # fmt: skip


def with_random(examples: int, check: Callable[[random.Random, Draw], None]) -> None:
    """Run ``check`` with so many generators, the same every time."""

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.data(), st.integers(0, 2**32))
    def run(data: st.DataObject, seed: int) -> None:
        check(random.Random(seed), data.draw)

    run()


def random_tools(rng: random.Random, names: Sequence[str]) -> list[dict[str, Any]]:
    """A tool of each name: a few required and optional arguments, any object, or no arguments."""
    tools: list[dict[str, Any]] = []
    for name in names:
        keys = [f"{rng.choice(('key', 'a_b', 'Item'))}{at}" for at in range(rng.randrange(4))]
        function: dict[str, Any] = {"name": name}
        if (kind := rng.random()) < 0.8:
            function["parameters"] = {
                "type": "object",
                "properties": {key: rng.choice(_LEAVES) for key in keys},
                "required": [key for key in keys if rng.random() < 0.6],
                "additionalProperties": False,
            }
        elif kind < 0.9:
            function["parameters"] = {"type": "object"}
        tools.append({"type": "function", "function": function})
    return tools


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is valid against a schema of ``random_tools``."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema.get("type")
    if kind == "object":
        properties = schema.get("properties", {})
        free = schema.get("additionalProperties", True)
        return (
            isinstance(value, dict)
            and all(key in value for key in schema.get("required", ()))
            and all(fits(item, properties[key]) if key in properties else free for key, item in value.items())
        )
    if kind == "array":
        return isinstance(value, list) and all(fits(item, schema["items"]) for item in value)
    if isinstance(value, bool) or value is None:
        return kind == ("boolean" if isinstance(value, bool) else "null")
    return isinstance(value, _SCALARS[str(kind)])


def leaves(value: Any) -> Counter[str]:
    """The scalars in a value, and how often each occurs."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return sum(map(leaves, value), Counter[str]())
    return Counter((json.dumps(value),))

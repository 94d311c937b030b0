"""Random JSON schemas of the keywords that are enforced, such as programs write them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

__all__ = ["random_schema", "random_schemas"]

Schema = dict[str, Any]

_NAMES = ("id", "name", "tags", "kind", "count", "größe", "first-name", "a", "unit", "note", "ok", "list_of_all")
_WORDS = ("red", "green", "blue", "left", "right", "on", "off", "né", 'say "hi"', "x/y", "a b")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration")
_PATTERNS = ("^[a-z]{1,8}$", "^[A-Z][a-z]{0,6}$", "^\\d{3}-\\d{4}$", "^(ab|cd)+$", "^v\\d+\\.\\d+$", "^\\w{2,5}$")


def random_schemas(number: int, seed: int = 0) -> list[Schema]:
    """``number`` schemas, each an object at the root."""
    rng = random.Random(seed)
    return [random_schema(rng) for _ in range(number)]


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """One schema whose root is an object; some have definitions, one of which may hold itself."""
    root = _object(rng, depth)
    if rng.random() < 0.2:
        root["$defs"] = {"item": _any(rng, 0), "node": {**_object(rng, 0)}}
        root["$defs"]["node"].setdefault("properties", {})["next"] = {
            "anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]
        }
        root["properties"]["node"] = {"$ref": "#/$defs/node"}
        root["properties"]["item"] = {"$ref": "#/$defs/item", "description": "refers"}
    return root


def _any(rng: random.Random, depth: int) -> Schema:
    leaves: list[Callable[[random.Random], Schema]] = [
        _string,
        _integer,
        _number,
        _constant,
        lambda _: {"type": "boolean"},
        lambda _: {"type": "null"},
    ]
    if depth <= 0 or rng.random() < 0.55:
        return rng.choice(leaves)(rng)
    return rng.choice([_object, _array, _union, _all])(rng, depth - 1)


def _string(rng: random.Random) -> Schema:
    match rng.randrange(5):
        case 0:
            return {"type": "string", "maxLength": rng.randint(4, 24)}
        case 1:
            return {"type": "string", "minLength": 2, "maxLength": rng.randint(4, 12)}
        case 2:
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case 3:
            return {"type": "string", "format": rng.choice(_FORMATS)}
    return {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": rng.randint(3, 9)}


def _bounds(rng: random.Random, low: float, high: float) -> Schema:
    out: Schema = {}
    if rng.random() < 0.9:
        out[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.9:
        out[rng.choice(["maximum", "exclusiveMaximum"])] = high
    return out


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50)
    if rng.random() < 0.2:
        return {"type": "integer", "multipleOf": rng.choice([2, 5, 10]), "minimum": low, "maximum": low + 100}
    return {"type": "integer", **_bounds(rng, low, low + rng.randint(3, 2000))}


def _number(rng: random.Random) -> Schema:
    low = round(rng.uniform(-20, 20), 2)
    return {"type": "number", **_bounds(rng, low, round(low + rng.uniform(1, 100), 1))}


def _constant(rng: random.Random) -> Schema:
    if rng.random() < 0.3:
        return {"const": rng.choice([*_WORDS, 7, 1.5, True, None, ["a", 1]])}
    return {"enum": rng.sample([*_WORDS, 0, -1, 2.5, False, None], rng.randint(2, 5))}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    out: Schema = {
        "type": "object",
        "title": "Generated",
        "properties": {name: _any(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if rng.random() < 0.7:
        out["additionalProperties"] = False
    elif rng.random() < 0.2:
        out["minProperties"] = 1
    return out


def _array(rng: random.Random, depth: int) -> Schema:
    out: Schema = {"type": "array", "items": _any(rng, depth), "maxItems": rng.randint(1, 4)}
    if rng.random() < 0.4:
        out["minItems"] = 1
    if rng.random() < 0.2:
        out["prefixItems"] = [_any(rng, 0)]
    return out


def _union(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.4:
        kinds = rng.sample(["circle", "square", "line"], 2)
        options = []
        for kind in kinds:
            option = _object(rng, depth)
            option["properties"] = {
                "kind": {"const": kind},
                **{name: inner for name, inner in option["properties"].items() if name != "kind"},
            }
            option["required"] = ["kind", *(name for name in option["required"] if name != "kind")]
            options.append(option)
        return {"oneOf": options, "discriminator": {"propertyName": "kind"}}
    if rng.random() < 0.5:
        return {"type": ["string", "null"], "maxLength": rng.randint(3, 10)}
    return {"anyOf": [_any(rng, depth), {"type": "null"}], "default": None}


def _all(rng: random.Random, depth: int) -> Schema:
    base = _object(rng, depth)
    base.pop("additionalProperties", None)
    return {"allOf": [base, {"properties": {"extra": _any(rng, 0)}, "required": ["extra"]}]}

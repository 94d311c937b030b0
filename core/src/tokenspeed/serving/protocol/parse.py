"""From the bytes of a body to a checked struct; every refusal names the field at fault.

``null`` means "not given" for every optional field. A field that is known but does nothing here is refused unless it carries its neutral value; an
unknown field is refused with the nearest known name.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from tokenspeed.errors import RequestError

__all__ = ["Refused", "json_object", "parse_object", "struct_schema"]

_T = TypeVar("_T", bound=msgspec.Struct)
_SECOND_LOOK_BYTES = 1 << 20
#: Longer names are no misspelling of a field, and looking for the nearest one costs their length.
_HINT_CHARS = 64
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?:key )?(?:in )?\$\.?(?P<path>.*)`)?$", re.DOTALL)


class Refused(NamedTuple):
    """A field that other servers know and this one does not serve.

    Attributes:
        why: completes "NAME is not supported: ...".
        neutral: values that ask for nothing and are let through.
    """

    why: str
    neutral: tuple[Any, ...] = ()


def json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        RequestError: it is no JSON, or no object.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        field = _not_finite(body)
        if field is not None:
            raise RequestError(f"{field}: every number must be finite", param=field, code="invalid_json") from error
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return value


def _not_finite(body: bytes) -> str | None:
    """The field that is or holds NaN, Infinity or a number too large for a double, which are no JSON but what some clients write."""
    if len(body) > _SECOND_LOOK_BYTES:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    fields = value.items() if isinstance(value, dict) else ()
    return next((name for name, field in fields if _holds_not_finite(field)), None)


def _holds_not_finite(value: Any) -> bool:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, float) and not math.isfinite(one):
            return True
        left.extend(one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
    return False


def parse_object(value: Mapping[str, Any], kind: type[_T], refused: Mapping[str, Refused], prefix: str = "") -> _T:
    """Check an object against a struct.

    Args:
        value: plain JSON.
        kind: the struct; its field names are what is supported.
        refused: fields that are known elsewhere.
        prefix: path of the object within the body, for messages.

    Raises:
        RequestError: naming the field.
    """
    known = kind.__struct_fields__
    given = {}
    for name, field in value.items():
        if field is None:
            continue
        if name in known:
            given[name] = field
        elif name in refused:
            entry = refused[name]
            if not any(type(field) is type(neutral) and field == neutral for neutral in entry.neutral):
                raise RequestError(
                    f"{prefix}{name} is not supported: {entry.why}",
                    param=f"{prefix}{name}",
                    code="unsupported_parameter",
                )
        else:
            near = difflib.get_close_matches(name, known, 1) if len(name) <= _HINT_CHARS else ()
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RequestError(
                f"unknown field {prefix}{name[:100]}{hint}", param=f"{prefix}{name[:100]}", code="unknown_parameter"
            )
    try:
        return msgspec.convert(given, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _named(str(error), prefix) from error


def _named(text: str, prefix: str) -> RequestError:
    match = _AT.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    missing = re.search(r"missing required field `(\w+)`", what)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
    name = f"{prefix}{path}"
    return RequestError(f"{name}: {what}" if name else what, param=name or None, code="invalid_type")


def struct_schema(kinds: tuple[Any, ...]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """JSON schemas of structs for the OpenAPI document: (one per kind, components by name)."""
    return msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")

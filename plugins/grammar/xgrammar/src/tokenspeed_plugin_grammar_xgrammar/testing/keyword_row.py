"""What is said and tried of one keyword of JSON Schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["NULLS", "PAIR", "Row", "Schema"]

Schema = Any


@dataclass(frozen=True, slots=True)
class Row:
    """One keyword.

    Attributes:
        keyword: its name.
        how: what happens to it, for the table.
        enforced: schemas that are taken; every text that they generate is valid.
        refused: schemas that are not, with the path that the error names.
    """

    keyword: str
    how: str
    enforced: tuple[Schema, ...] = ()
    refused: tuple[tuple[Schema, str], ...] = ()


PAIR: Schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}}
NULLS: Schema = {"type": "array", "items": {"type": "null"}}

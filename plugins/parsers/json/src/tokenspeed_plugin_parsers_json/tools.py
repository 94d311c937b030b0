"""Calls as bare JSON: one object, several, or an array of them."""

from __future__ import annotations

from tokenspeed.interfaces.parsing import BareJsonParser

__all__ = ["JsonToolParser"]


class JsonToolParser(BareJsonParser):
    """For models that are told to answer with ``{"name": .., "arguments": {..}}``; ``parameters`` is read as well."""

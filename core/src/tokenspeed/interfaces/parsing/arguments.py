"""Arguments that a format writes one by one, put together as a JSON object while they arrive."""

from __future__ import annotations

from tokenspeed.interfaces.parsing.json_stream import JsonStream, Progress, quote
from tokenspeed.interfaces.parsing.machine import SPACE, Output
from tokenspeed.interfaces.parsing.scanner import Markers, Scanner
from tokenspeed.interfaces.parsing.schema import ANY, STRING, ToolSchemas, Types, to_json

__all__ = ["ArgumentWriter"]


class ArgumentWriter:
    """Writes ``{"key": value, ..}`` to the call that began last.

    A value whose type is string alone is told as it comes; any other is held until it is complete, since its form depends on all of it. A key that was
    given before is ignored, with its value.

    Args:
        out: where to write.
        schemas: the request's tools.
        tool: name of the called tool.
        trim: one line break at each end of a value belongs to the markup.
        held: arguments are known to be of the declared types, so that one which can be an array or object is JSON if it begins like it.
    """

    __slots__ = (
        "_held",
        "_held_to_types",
        "_json",
        "_keys",
        "_line_break",
        "_out",
        "_schemas",
        "_skip",
        "_started",
        "_started_json",
        "_tool",
        "_trim",
        "_types",
    )

    def __init__(self, out: Output, schemas: ToolSchemas, tool: str, *, trim: bool, held: bool = False) -> None:
        self._out = out
        self._schemas = schemas
        self._tool = tool
        self._trim = trim
        self._held_to_types = held
        self._json: JsonStream | None = None
        self._started_json = False
        self._keys: set[str] = set()
        self._types: Types = STRING
        self._skip = False
        self._started = False  # something of the value has arrived
        self._line_break = False  # a trailing line break is held back
        self._held: list[str] = []

    def begin(self, key: str, types: Types | None = None, *, json: bool = False) -> None:
        """An argument begins; ``types`` replaces what the schema says; ``json``: it is JSON for sure."""
        stated = self._schemas.types(self._tool, key) if types is None else types
        follows = json or (self._held_to_types and stated != ANY and not stated.isdisjoint(("array", "object")))
        self._json, self._started_json = JsonStream() if follows else None, False
        self._skip = key in self._keys
        self._started = self._line_break = False
        self._held = []
        if self._skip:
            return
        self._types = stated
        self._out.arguments(("{" if not self._keys else ", ") + quote(key) + ": ")
        self._keys.add(key)
        if self._types == STRING:
            self._out.arguments('"')

    def read(self, scan: Scanner, ends: Markers) -> str:
        """Take the value from ``scan`` up to the marker that ends it: that marker, nothing while it goes on.

        A value that is known to be JSON is followed by JSON's own rules, so that its strings may hold markers.
        """
        if self._json is not None and self._follow(scan, self._json):
            return ""
        text, marker = scan.until(ends)
        self.value(text)
        return marker

    def _follow(self, scan: Scanner, json: JsonStream) -> bool:
        """Take what belongs to the JSON; whether it goes on."""
        if not self._started_json:
            self.value(scan.match(SPACE))
            if scan.empty:
                return True
            self._started_json = scan.peek() in "{["
        if self._started_json:
            begin = scan.pos
            _, scan.pos = json.feed(scan.text, begin)
            self.value(scan.text[begin : scan.pos])
            if json.progress is Progress.OPEN:
                return True
        self._json, self._started_json = None, False
        return False

    def value(self, text: str) -> None:
        """More of the value."""
        if self._skip or not text:
            return
        if self._trim:
            if not self._started:
                self._started = True
                text = text.removeprefix("\n")
            if not text:
                return
            if self._line_break:
                text = "\n" + text
            self._line_break = text.endswith("\n")
            text = text.removesuffix("\n")
        if self._types == STRING:
            self._out.arguments(quote(text)[1:-1])
        else:
            self._held.append(text)

    def end(self) -> None:
        """The value is complete."""
        if not self._skip:
            self._out.arguments('"' if self._types == STRING else to_json("".join(self._held), self._types))

    def close(self) -> None:
        """The call is complete."""
        self._out.arguments("}" if self._keys else "{}")

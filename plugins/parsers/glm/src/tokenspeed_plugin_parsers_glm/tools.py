"""GLM tool calls: the function's name, then pairs of ``<arg_key>`` and ``<arg_value>``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.parsing import ArgumentWriter, Markers, StateMachine, ToolSchemas, structural

__all__ = ["GlmToolParser"]

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_TURNS = ("<|observation|>", "<|user|>", "<|endoftext|>")
_MARKERS = Markers((_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END, *_TURNS))
_VALUE_ENDS = Markers((_VALUE_END, _KEY, _END))
_EXACT_ENDS = Markers((_VALUE_END,))
_NAME = re.compile(r"""\s*(?P<name>[^\s<>{}\[\]"']+)\s*""")
_MAX_HEADER = 1024

#: Names of arguments that a grammar may lead to: what the parser reads back.
_ARGUMENT = re.compile(r"[^\s<>](?:[^<>\n]*[^\s<>])?")


class GlmToolParser(StateMachine):
    """States: text, name, call, key, behind the key, value.

    GLM-4.5 breaks lines between the elements, GLM-4.7 does not. A value ends at its closing tag, at the next key or at the end of the call; a malformed
    name makes the call content, a malformed key drops that argument.
    """

    needs_special_tokens = True
    announcements = (_BEGIN,)

    def __init__(self, ctx: ParserContext) -> None:
        super().__init__(ctx)
        self.schemas = ToolSchemas(ctx.tools)
        self._writer = ArgumentWriter(self.out, self.schemas, "", trim=False)
        self._header: list[str] = []
        self._size = 0
        self._key = ""

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        return structural.calls(
            structural.functions(tools, names, keys=_ARGUMENT),
            lambda name, parameters: structural.tag(f"{_BEGIN}{name}", structural.schema(parameters, "glm_xml"), _END),
            required=required,
            parallel=parallel,
            separator="\n",
            triggers=(_BEGIN,),
        )

    def on_text(self) -> bool:
        text, marker = self.scan.until(_MARKERS)
        self.out.text(text)
        if marker:
            self.out.markup()
        if marker == _BEGIN:
            self._header, self._size, self.state = [], 0, self.on_name
        return bool(marker)

    def _collect(self) -> str | None:
        """Header text up to a marker: the marker, nothing if the header is too long, ``None`` while it goes on."""
        text, marker = self.scan.until(_MARKERS)
        spare = _MAX_HEADER - self._size - len(text)
        if spare < 0:  # cut at the limit itself, wherever the text was cut when it arrived
            self.scan.pos += spare - len(marker)
            self._header.append(text[:spare])
            return ""
        self._header.append(text)
        self._size += len(text)
        return marker or None

    def on_name(self) -> bool:
        marker = self._collect()
        if marker is None:
            return False
        text = "".join(self._header)
        match = _NAME.fullmatch(text) if marker in (_KEY, _END) else None
        if match is None or not match["name"].isprintable():
            self.out.text(text)
            self.state = self.on_text
            self.scan.pos -= len(marker)
            return True
        self.out.begin(match["name"])
        self._writer = ArgumentWriter(
            self.out, self.schemas, match["name"], trim=False, held=match["name"] in self.ctx.held
        )
        self._inside(marker)
        return True

    def on_call(self) -> bool:
        """Between arguments; text here is noise."""
        _, marker = self.scan.until(_MARKERS)
        if marker:
            self._inside(marker)
        return bool(marker)

    def _inside(self, marker: str) -> None:
        if marker == _KEY:
            self._header, self._size, self.state = [], 0, self.on_key
        elif marker in (_END, _BEGIN, *_TURNS):
            self._writer.close()
            self.out.markup()
            self.state = self.on_text
            if marker == _BEGIN:
                self.scan.pos -= len(marker)
        else:
            self.state = self.on_call

    def on_key(self) -> bool:
        marker = self._collect()
        if marker is None:
            return False
        self._key = "".join(self._header).strip()
        if marker == _KEY_END and self._key:
            self.state = self.on_key_end
        else:
            self._inside(marker)
        return True

    def on_key_end(self) -> bool:
        _, marker = self.scan.until(_MARKERS)
        if marker == _VALUE:
            self._writer.begin(self._key)
            self.state = self.on_value
        elif marker:
            self._inside(marker)
        return bool(marker)

    def on_value(self) -> bool:
        marker = self._writer.read(self.scan, _EXACT_ENDS if self.ctx.constrained else _VALUE_ENDS)
        if not marker:
            return False
        self._writer.end()
        self._inside(marker)
        return True

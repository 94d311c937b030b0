"""Mistral tool calls: an array of objects (tokenizers v2 to v7), or a name and its arguments (v11 and later)."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.parsing import SPACE, JsonCall, MarkedJsonParser, MarkedSyntax, Progress, structural

__all__ = ["MistralToolParser"]

_ID = re.compile(r"[a-zA-Z0-9]{9}")
_HEADER_SO_FAR = re.compile(r"\s*[^\s\[\]{}]*\s*(?:\[.*)?", re.DOTALL)
_ALPHABET = string.ascii_letters + string.digits
_ARRAY_SPACE = re.compile(r"[\s,]*")


def _nine(seed: str) -> str:
    """Nine letters and digits that follow from ``seed``."""
    number = int.from_bytes(hashlib.blake2b(seed.encode("utf-8", "replace"), digest_size=8).digest(), "big")
    letters = []
    for _ in range(9):
        number, letter = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[letter])
    return "".join(letters)


class MistralToolParser(MarkedJsonParser):
    """Which form follows the marker shows at its first character.

    The tokenizer library refuses ids that are not nine letters and digits, so the parser makes them where the model writes none in time. They are derived
    from the prompt and the call's place in the conversation, and so do not depend on how the text was cut.
    """

    syntax = MarkedSyntax(
        begin=("[TOOL_CALLS]",),
        end=(),
        around=("</s>",),
        separators=("[CALL_ID]", "[ARGS]"),
        header=re.compile(r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w*)\s*)?(?:\[ARGS\]\s*)?"),
        closers=SPACE,
    )
    needs_special_tokens = True
    announcements = ("[TOOL_CALLS]",)

    def __init__(self, ctx: ParserContext) -> None:
        super().__init__(ctx)
        self._call = JsonCall()
        self._told = False

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None = None, required: bool, parallel: bool
    ) -> Mapping[str, Any] | None:
        """Either form, as the model knows it: which one its tokenizer goes with cannot be told from here."""
        begin, arguments = cls.syntax.begin[0], cls.syntax.separators[1]
        called = structural.functions(tools, names)
        row = {"separator": "", "at_least_one": True, "stop_after_first": not parallel}
        array = structural.tag(
            f"{begin}",
            structural.sequence(
                {"type": "regex", "pattern": r" ?\["},
                {
                    **row,
                    "type": "tags_with_separator",
                    "tags": [
                        structural.tag(f'{{"name": "{name}", "arguments": ', structural.schema(parameters), "}")
                        for name, parameters in called
                    ],
                    "separator": ", ",
                },
            ),
            "]",
        )
        named = [
            structural.tag(f"{begin}{name}{arguments}", structural.schema(parameters), "")
            for name, parameters in called
        ]
        if required:
            return structural.structural_tag(
                structural.one_of(array, {**row, "type": "tags_with_separator", "tags": named})
            )
        return structural.structural_tag(
            {
                "type": "triggered_tags",
                "triggers": [begin],
                "tags": [array, *named],
                "at_least_one": False,
                "stop_after_first": not parallel,
                "excludes": [],
            }
        )

    def identify(self, header: re.Match[str]) -> tuple[str, str | None]:
        return header["name"], self._id(header["id"])

    def _id(self, given: str | None) -> str:
        if given and _ID.fullmatch(given):
            return given
        return _nine(f"{self.ctx.history_calls + self.out.count}:{self.ctx.prompt_tail}")

    @classmethod
    def history_id(cls, call_id: str, name: str, index: int) -> str:
        """The templates refuse ids of any other form, so those are replaced by one that follows from them."""
        return call_id if _ID.fullmatch(call_id) else _nine(f"{index}:{name}:{call_id}")

    def _enter_header(self) -> None:
        super()._enter_header()
        self.state = self.on_form

    def on_form(self) -> bool:
        """Behind the marker: an array, or a name."""
        self.scan.match(SPACE)
        if self.scan.empty:
            return False
        following = self.scan.text[self.scan.pos : self.scan.pos + 2]
        if following == "[" and not self.scan.closed:
            return False
        if following[0] == "[" and following[1:] not in ("C", "A", "T"):  # none of the markers
            self.scan.pos += 1
            self.state = self.on_array
        else:
            self.state = self.on_header
        return True

    def on_header(self) -> bool:
        again = super().on_header()
        if self.state == self.on_header and not _HEADER_SO_FAR.fullmatch("".join(self._raw)):
            self._header_to_text()
            return True
        return again

    def on_array(self) -> bool:
        """Between the objects of an array."""
        self.scan.match(_ARRAY_SPACE)
        if self.scan.empty:
            return False
        if self.scan.peek() == "{":
            self._call, self._told, self._raw = JsonCall(), False, []
            self.state = self.on_object
            return True
        if self.scan.peek() == "]":
            self.scan.pos += 1
        self.out.markup()
        self.state = self.on_text
        return True

    def on_object(self) -> bool:
        call, begin = self._call, self.scan.pos
        told, self.scan.pos = call.feed(self.scan.text, begin)
        self._raw.append(self.scan.text[begin : self.scan.pos])
        if call.begun and not self._told and call.name is not None:
            self.out.begin(call.name, self._id(call.id))
            self._told = True
        self.out.arguments(told)
        if call.progress is Progress.OPEN:
            return False
        if call.progress is Progress.FAILED:
            self._to_content()
        else:
            self.state = self.on_array
        return True

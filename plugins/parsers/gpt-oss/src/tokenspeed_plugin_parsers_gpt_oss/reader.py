"""The harmony format of gpt-oss, read once for both kinds of parser.

A message is ``<|start|>ROLE[ to=RECIPIENT]<|channel|>CHANNEL[ to=RECIPIENT][ <|constrain|>TYPE]<|message|>BODY`` and one of ``<|end|>``, ``<|call|>``,
``<|return|>``. The prompt ends behind a role, or further on. Headers come slightly wrong now and then; what can be told from one is used:

* the last ``<|channel|>`` of a header counts, and the first word behind it; a recipient may stand in the role or the channel part;
* a recipient makes the message a call, on whatever channel, if its body is a JSON object (``functions.`` is taken off, other names stay whole);
* without a recipient the analysis channel is reasoning, and any other is visible text;
* a header that never reaches ``<|message|>`` is read as if it stood before the first brace or behind the channel's word.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum

from tokenspeed.interfaces.parsing import SPACE, JsonStream, Markers, Progress, Scanner, partial

__all__ = ["Event", "HarmonyReader"]

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKERS = Markers((_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS))
_RECIPIENT = re.compile(r"\bto=(?P<space>functions\.)?(?P<name>[^\s<{]*)")
_NO_TOOL = ("", "assistant", "user", "all", "system", "developer")
# What may follow the role that the prompt ends with, apart from a marker: a recipient, or as much of one as is there.
_ROLE_REST = re.compile(rf"\s{{0,4}}+(?:\Z|{partial('to=')}\S*\s*\Z)")
_WORD = re.compile(r"\W*(\w+)")
_CLOSERS = re.compile(r"[\s}]*")
_MAX_HEADER = 1024


class Event(Enum):
    """What the reader tells."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"  # the name of a function
    ARGUMENTS = "arguments"


class HarmonyReader:
    """Reads generated text and tells ``(event, text)`` through ``tell``.

    Args:
        prompt_tail: the end of the rendered prompt.
        tell: receives what is read, in order.
    """

    def __init__(self, prompt_tail: str, tell: Callable[[Event, str], None]) -> None:
        self._tell = tell
        self._scan = Scanner()
        self._state: Callable[[], bool] = self._role
        self._prompted = True  # the role stood in the prompt: text here may be the answer itself
        self._parts: list[str] = []  # of the header part being read
        self._size = 0
        self._role_part = ""
        self._channel = ""
        self._kind = Event.CONTENT
        self._name = ""
        self._raw: list[str] = []  # of the call so far, should it be none
        self._json = JsonStream()
        self._begin_from(prompt_tail)

    @property
    def reasoning(self) -> bool:
        """Whether text that arrives now is reasoning."""
        return self._state == self._body and self._kind is Event.REASONING

    def feed(self, text: str) -> None:
        """Take the next piece of generated text."""
        self._scan.append(text)
        while self._state():
            pass

    def finish(self) -> None:
        """The text is at its end."""
        self._scan.closed = True
        while self._state():
            pass
        if self._state == self._role and self._prompted:
            self._emit(Event.CONTENT, "".join(self._parts))

    def end_reasoning(self) -> None:
        """Tell what is held back; what is still to come in this message is content."""
        if self._state == self._body:
            self._emit(self._kind, self._scan.text[self._scan.pos :])
            self._scan.pos = len(self._scan.text)
            self._kind = Event.CONTENT

    def _begin_from(self, prompt_tail: str) -> None:
        """Take up the message that the prompt leaves open."""
        begin = prompt_tail.rfind(_START)
        if begin < 0:
            return
        silent, self._tell = self._tell, lambda _event, _text: None
        self.feed(prompt_tail[begin:])
        self._tell = silent
        if self._state == self._role:
            self._prompted, self._parts, self._size = True, [], 0

    def _emit(self, event: Event, text: str) -> None:
        if text:
            self._tell(event, text)

    # -- headers

    def _enter(self, state: Callable[[], bool]) -> None:
        self._parts, self._size, self._state = [], 0, state

    def _collect(self) -> str | None:
        """Header text up to a marker: the marker, nothing if the header is too long, ``None`` while it goes on."""
        text, marker = self._scan.until(_MARKERS)
        spare = _MAX_HEADER - self._size - len(text)
        if spare < 0:  # cut at the limit itself, wherever the text was cut when it arrived
            self._scan.pos += spare - len(marker)
            self._parts.append(text[:spare])
            return ""
        self._parts.append(text)
        self._size += len(text)
        return marker or None

    def _role(self) -> bool:
        marker = self._collect()
        part = "".join(self._parts)
        if self._prompted and _ROLE_REST.match(part) is None:
            return self._to_body(Event.CONTENT, part, marker or "")
        if marker is None:
            return False
        if not marker:
            return self._to_body(Event.CONTENT, part)
        self._role_part, self._channel, self._prompted = part, "", False
        if marker in (_CHANNEL, _CONSTRAIN):
            self._enter(self._header)
        elif marker == _MESSAGE:
            self._end_header()
        else:
            self._other(marker)
        return True

    def _header(self) -> bool:
        marker = self._collect()
        if marker is None:
            return False
        if marker == _CONSTRAIN:
            self._parts.append(" ")
            return True
        part = "".join(self._parts)
        if marker == _CHANNEL:
            self._enter(self._header)
        elif marker == _MESSAGE:
            self._channel = part
            self._end_header()
        elif marker:
            self._recover(part)
            self._other(marker)
        else:
            self._channel = part
            self._recover(part)
        return True

    def _other(self, marker: str) -> None:
        """A marker outside headers."""
        if marker == _START:
            self._enter(self._role)
            self._prompted = False
        elif marker == _CHANNEL:
            self._role_part = ""
            self._enter(self._header)
        elif marker in _ENDS:
            self._kind, self._state = Event.CONTENT, self._body

    def _read_header(self) -> None:
        """What channel and recipient say."""
        word = _WORD.match(self._channel)
        self._kind = Event.REASONING if word and word[1].startswith("analysis") else Event.CONTENT
        recipient = _RECIPIENT.search(self._channel) or _RECIPIENT.search(self._role_part)
        name = recipient["name"] if recipient else ""
        is_tool = recipient is not None and (recipient["space"] is not None or name not in _NO_TOOL)
        self._name = name if is_tool and name.isprintable() else ""

    def _end_header(self) -> None:
        self._read_header()
        self._raw = []
        self._state = self._call_start if self._name else self._body

    def _recover(self, part: str) -> None:
        """A header without ``<|message|>``: its text is header and body in one."""
        self._channel = part
        self._read_header()
        self._state = self._body
        if self._name and "{" in part:
            stream = JsonStream()
            body = part[part.index("{") :].rstrip()
            copied, end = stream.feed(body)
            if stream.progress is Progress.DONE and end == len(body):
                self._emit(Event.CALL, self._name)
                self._emit(Event.ARGUMENTS, copied)
                return
        word = _WORD.match(part)
        known = word is not None and word[1] in ("analysis", "commentary", "final")
        self._emit(self._kind, part[word.end() :].lstrip() if known and word else part)

    # -- bodies

    def _to_body(self, kind: Event, text: str, marker: str = "") -> bool:
        """The text so far, and all up to the next marker, is of this kind."""
        self._emit(kind, text)
        self._scan.pos -= len(marker)
        self._kind, self._prompted, self._state = kind, False, self._body
        return True

    def _body(self) -> bool:
        text, marker = self._scan.until(_MARKERS)
        self._emit(self._kind, text)
        if marker:
            self._other(marker)
        return bool(marker)

    def _call_start(self) -> bool:
        self._raw.append(self._scan.match(SPACE))
        if self._scan.peek() == "{":
            self._json, self._state = JsonStream(), self._arguments
            self._emit(Event.CALL, self._name)
            return True
        text, marker = self._scan.until(_MARKERS)
        if text:
            return self._to_body(self._kind, "".join(self._raw) + text, marker)
        if not marker:
            return False
        if marker in _ENDS:  # no arguments at all
            self._emit(Event.CALL, self._name)
            self._emit(Event.ARGUMENTS, "{}")
        self._state = self._body
        self._other(marker)
        return True

    def _arguments(self) -> bool:
        begin = self._scan.pos
        copied, self._scan.pos = self._json.feed(self._scan.text, begin)
        self._raw.append(self._scan.text[begin : self._scan.pos])
        self._emit(Event.ARGUMENTS, copied)
        if self._json.progress is Progress.FAILED:
            return self._to_body(self._kind, _MARKERS.strip("".join(self._raw)))
        if self._json.progress is Progress.OPEN:
            return False
        self._raw, self._state = [], self._closers
        return True

    def _closers(self) -> bool:
        """Behind complete arguments: a stray brace is a common slip."""
        self._scan.match(_CLOSERS)
        if self._scan.empty:
            return False
        self._state = self._body
        return True

"""From token ids to text, piece by piece.

Most tokenizers decode by concatenating the bytes that stand behind each id (byte-level BPE, SentencePiece with byte fallback). For these the text of
a stream is an incremental UTF-8 decode of those bytes: an unfinished character waits, nothing sent is ever taken back, and each token costs its own
length. ``WindowDetokenizer`` serves the rest by comparing decodes of a short window of ids.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

__all__ = ["ByteDetokenizer", "Detokenizer", "PieceTable", "WindowDetokenizer"]

REPLACEMENT = "\ufffd"


class PieceTable(dict[int, bytes]):
    """Bytes by token id, filled on first use from ``piece_of``."""

    def __init__(self, piece_of: Callable[[int], bytes]) -> None:
        super().__init__()
        self._piece_of = piece_of

    def __missing__(self, token: int) -> bytes:
        piece = self[token] = self._piece_of(token)
        return piece


class Detokenizer(ABC):
    """Text of one choice; the concatenation of everything returned is the text."""

    @abstractmethod
    def feed(self, tokens: Sequence[int]) -> str:
        """Text that ``tokens`` complete."""

    @abstractmethod
    def finish(self) -> str:
        """Text of what was held back: an unfinished character becomes U+FFFD."""


class ByteDetokenizer(Detokenizer):
    """Concatenates pieces and decodes them as UTF-8; a broken sequence becomes U+FFFD once it can no longer be completed."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, tokens: Sequence[int]) -> str:
        pieces = self._pieces
        return self._decode(pieces[tokens[0]] if len(tokens) == 1 else b"".join([pieces[token] for token in tokens]))

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer(Detokenizer):
    """For decoders that are no concatenation of bytes: text is what a window of ids gained over the part of it already sent.

    The window starts at the last point where text was complete before the newest completed token, so it stays a few ids long. Text that ends
    in U+FFFD waits for at most ``patience`` more tokens (a character has four bytes at most), then it is taken for what it is.
    """

    patience = 4

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._sent = 0  # ids of the window whose text was sent
        self._sent_text = ""

    def feed(self, tokens: Sequence[int]) -> str:
        out = []
        for token in tokens:
            self._window.append(token)
            text = self._decode(self._window)
            waiting = len(self._window) - self._sent
            if (text.endswith(REPLACEMENT) and waiting <= self.patience) or not text.startswith(self._sent_text):
                continue
            out.append(self._advance(text))
        return "".join(out)

    def _advance(self, text: str) -> str:
        delta = text[len(self._sent_text) :]
        if delta:
            self._window = self._window[self._sent :]
            self._sent = len(self._window)
            self._sent_text = self._decode(self._window)
        return delta

    def finish(self) -> str:
        if self._sent == len(self._window):
            return ""
        text = self._decode(self._window)
        return text[len(self._sent_text) :] if text.startswith(self._sent_text) else ""

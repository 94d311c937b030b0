"""A tokenizer whose ids 0..255 are bytes: for tests and benchmarks of the server that need no model files."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.serving.chat_template import ChatTemplate
from tokenspeed.serving.detokenizer import ByteDetokenizer, Detokenizer, PieceTable
from tokenspeed.serving.tokenizer import Tokenizer

__all__ = ["ByteTokenizer"]

_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


class ByteTokenizer(Tokenizer):
    """Ids from 256 up to ``vocab_size`` are special and have no text; ``eos_id`` is the first of them."""

    def __init__(self, vocab_size: int = 257, *, chat_template: str | None = None) -> None:
        self.vocab_size = vocab_size
        self.eos_id = 256
        self.max_piece_bytes = 1
        self.chat_template = ChatTemplate(chat_template or _TEMPLATE, {})
        self.special_tokens = {token: f"<{token}>" for token in range(256, vocab_size)}
        self._pieces = PieceTable(lambda token: bytes((token,)) if 0 <= token < 256 else b"")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        return list(text.encode())

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return b"".join(self._pieces[token] for token in tokens).decode("utf-8", "replace")

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:  # noqa: ARG002
        return ByteDetokenizer(self._pieces)

    def piece(self, token: int) -> bytes:
        return self._pieces[token] or b"<%d>" % token

"""What each id of a tokenizer stands for, in bytes. Shared by the server, which shows tokens, and the engine, whose grammars are made of them; torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from tokenspeed.byte_alphabet import byte_alphabet

__all__ = ["decoder_steps", "piece_function"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_function(core: tokenizers.Tokenizer) -> Callable[[int], bytes] | None:
    """A function from id to bytes where the tokenizer's decoder is a concatenation of such pieces, else ``None``."""
    steps = decoder_steps(core)
    kinds = [step["type"] for step in steps]
    added = {token: str(entry.content).encode() for token, entry in core.get_added_tokens_decoder().items()}
    if kinds == ["ByteLevel"]:
        alphabet = {char: byte for byte, char in enumerate(byte_alphabet())}

        def byte_level(token: int) -> bytes:
            if token in added:  # written as it reads, whatever its characters stand for in the byte alphabet
                return added[token]
            text = core.id_to_token(token)
            if text is None:
                return b""
            try:
                return bytes([alphabet[char] for char in text])
            except KeyError:
                return str(text).encode()

        return byte_level
    if (
        kinds
        and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
        and all("String" in s["pattern"] for s in steps if s["type"] == "Replace")
    ):
        replacements = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
        fallback = "ByteFallback" in kinds

        def sentence_piece(token: int) -> bytes:
            text = core.id_to_token(token)
            if text is None:
                return b""
            if fallback and (match := _BYTE_TOKEN.fullmatch(text)):
                return bytes((int(match[1], 16),))
            for old, new in replacements:
                text = text.replace(old, new)
            return str(text).encode()

        return sentence_piece
    return None


def decoder_steps(core: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of the tokenizer's decoder; empty where it has none."""
    if core.decoder is None:
        return []
    state = json.loads(core.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]
